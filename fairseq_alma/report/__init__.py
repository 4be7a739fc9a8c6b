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
runs.py         the classes: Run; RunGroup, runs that differ only in the seed; Comparison, groups on one stream; labels
grouping.py     makes groups and comparisons from runs
objectives.py   what "best" means: over all arrivals, after the first stage, or at the end; on test and validation data
numbers.py      computes the metrics of a group, mean and standard error over its seeds, and ranks the groups
periods.py      the matrix of losses by period of streams in the order of a date
tables.py       summary of all groups, and the paper's Tables 1 and 2, as CSV, Markdown and LaTeX
paper.py        the values that the paper printed in its Table 2
policies.py     functions that decide at each arrival whether to train
simulation.py   what such a policy costs on the paths that runs have measured
decide.py       tables of policies, for `alma-report decide`
sweep.py        prints the table at the end of a sweep (one command that trains many combinations of settings)
figures/        figures as PNG and PDF
page/           index.html
cli.py          the command alma-report
"""
