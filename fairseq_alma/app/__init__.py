"""What the commands share around a run: errors told, tables, pictures, sweeps. Of ours it imports core alone.

command.py   a command that is a Hydra app: alma-lm, alma-vision
tables.py    a ledger for reading
plots.py     scores after each arrival, as a picture
sweep.py     after -m: the runs, best by validation first
"""
