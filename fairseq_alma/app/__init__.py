"""Code that the commands alma-lm and alma-vision share. It imports only core from the other packages of the project.

command.py   commands that use Hydra: arguments, error messages, `status`
help.py      the text of --help, generated from the settings classes
plugins.py   Python modules that the user adds with plugin=MODULE
tables.py    prints a ledger as a table on the terminal
scalars.py   TensorBoard scalars in RUN/tensorboard
sweep.py     the table of runs at the end of a sweep
"""
