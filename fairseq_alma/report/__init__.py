"""alma-report: figures, tables and a page from run folders. It reads files alone: no torch, no fairseq, of ours core.

The way of the data:

runs.py         run folders -> Run (one setting, its seeds), grouped into Comparison (what may be compared)
numbers.py      ledgers -> CER, average perplexity, Mem, Comp ...: mean and standard error over seeds
choice.py       numbers -> Pareto front, the best within a budget, what another wait or a growing learner came to
tables.py       -> Table 1, Table 2, summary: CSV, Markdown, LaTeX        paper.py: the paper's values
figures/        -> PNG, PDF
page/           -> index.html
write.py        all of it into REPORT             cli.py: the command
"""
