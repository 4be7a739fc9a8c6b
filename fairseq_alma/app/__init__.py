"""Code that the commands alma-lm and alma-vision share. Of the packages of the project, it imports only core.

command.py   commands that use Hydra: arguments, error messages, `status`
help.py      the text of --help, generated from the settings classes
plugins.py   Python modules that the user adds with plugin=MODULE
tables.py    prints a ledger as a table on the terminal
scalars.py   TensorBoard scalars in RUN/tensorboard
sweep.py     the table at the end of a sweep, which is one command that trains many combinations of settings
"""
