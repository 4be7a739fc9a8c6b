"""alma-report makes figures, tables and a page from run folders. It needs neither torch nor fairseq.

A run is one folder with the results of one setting and one seed. A stream delivers its data in parts, the mega-batches.
An arrival is the moment at which a mega-batch becomes available. Each run has a ledger: a file with the costs and
results of the run after each arrival.

The metrics are those of the paper:

CER                   error rates, summed over the arrivals
average perplexity    perplexities, averaged over the arrivals (arithmetic mean)
Mem                   numbers of parameters, summed over the arrivals
Comp                  training FLOPs, summed over the stream

The modules, in the order in which the data passes through them:

reading.py      reads run folders into Run objects
runs.py         the classes: Run; RunGroup, runs that differ only in the seed; Comparison, groups on one stream
grouping.py     makes groups and comparisons from runs
labels.py       names and order of groups
appearance.py   colours and symbols of learners
numbers.py      computes the metrics of a group: mean and standard error over its seeds
objectives.py   what "best" means: over all arrivals, after the first stage, or at the end; on test and validation data
choice.py       finds the best group within a budget, its rivals, and the groups that no other group beats
alternatives.py finds the alternatives to a group: the same run with another decision of the user
commands.py     makes command lines of alternatives that were not run
glossary.py     reads the glossary of the documentation, which the page shows
tables.py       summary of all groups, and the paper's Tables 1 and 2, as CSV, Markdown and LaTeX
paper.py        the values that the paper printed in its Table 2
figures/        figures as PNG and PDF
page/           index.html, a page for choosing a setting
write.py        writes tables, figures and the page into a folder
cli.py          the command alma-report
"""
