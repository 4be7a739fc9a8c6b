"""What the commands share around a run: errors told, tables, TensorBoard, sweeps. Of ours it imports core alone.

command.py   a command that is a Hydra app: alma-lm, alma-vision
tables.py    a ledger for reading
scalars.py   RUN/tensorboard while a run goes on
sweep.py     after -m: the runs, best by validation first
"""
