"""What the commands share around a run. Of our own modules it imports only core.

command.py   a command that is a Hydra app (alma-lm, alma-vision): arguments, errors, status
help.py      the text of --help, made from the settings classes
plugins.py   modules of the user, given as plugin=
tables.py    a ledger as a table on the terminal
scalars.py   RUN/tensorboard
sweep.py     the table at the end of a sweep
"""
