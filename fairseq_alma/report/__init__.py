"""alma-report makes figures, tables and a page from run folders. It needs neither torch nor fairseq.

The modules, in the order in which the data passes through them:

reading.py      run folders -> Run objects
grouping.py     runs -> RunGroup (one setting, several seeds) -> Comparison (one stream)      runs.py: the classes
labels.py       names and order of groups          appearance.py: colours and symbols of learners
numbers.py      ledgers -> mean and standard error over seeds of CER, average perplexity, Mem and Comp
choice.py       numbers -> Pareto front, best run within a budget, runs that differ from it in one decision
tables.py       -> summary, Table 1, Table 2 as CSV, Markdown, LaTeX          paper.py: values of the paper's Table 2
figures/        -> PNG, PDF
page/           -> index.html
write.py        writes all of them into a folder          cli.py: the command
"""
