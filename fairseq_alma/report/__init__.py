"""alma-report: figures, tables and a page from run folders. It reads files only and needs neither torch nor fairseq.

In the order in which the data passes through them:

reading.py      run folders -> Run objects
grouping.py     runs -> RunGroup (one setting, several seeds) -> Comparison (one stream)      runs.py: the classes
labels.py       names and order of groups          appearance.py: colours and symbols of learners
numbers.py      ledgers -> CER, average perplexity, Mem, Comp: mean and standard error over seeds
choice.py       numbers -> Pareto front, best run within a budget, what another decision would have given
tables.py       -> summary, Table 1, Table 2 as CSV, Markdown, LaTeX          paper.py: the values in the paper
figures/        -> PNG, PDF
page/           -> index.html
write.py        writes all of them into a folder          cli.py: the command
"""
