"""alma-report makes figures, tables and a page from run folders. It needs neither torch nor fairseq.

Each run has a ledger: a file with the costs and results of the run after each arrival of a mega-batch. The metrics are
those of the paper: CER (error rates summed over the arrivals), average perplexity, Mem (numbers of parameters summed
over the arrivals) and Comp (training FLOPs).

The modules, in the order in which the data passes through them:

reading.py      run folders -> Run objects
grouping.py     runs -> RunGroup (equal settings, several seeds) -> Comparison (one stream)   runs.py: the classes
labels.py       names and order of groups          appearance.py: colours and symbols of learners
numbers.py      ledgers -> mean and standard error over seeds of CER, average perplexity, Mem and Comp
choice.py       numbers -> Pareto front, best run within a budget, runs that differ in one decision of the user
tables.py       -> summary, Table 1, Table 2 as CSV, Markdown, LaTeX          paper.py: values of the paper's Table 2
figures/        -> PNG, PDF
page/           -> index.html, a page for choosing a run
write.py        writes all of them into a folder          cli.py: the command
"""
