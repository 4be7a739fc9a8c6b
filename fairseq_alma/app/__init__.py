"""Code that the commands alma-lm and alma-vision share. It imports no other package of the project except core.

command.py   common code of the two commands: arguments (read by Hydra) and error messages
run_commands.py    the subcommands status, cancel and logs
slurm_jobs.py      submits the Slurm jobs of runs, and continues the work in them
arguments.py checks the command line, and gives it to Hydra in the form that it reads
signals.py   stops a command by the signals of a scheduler
help.py      the text of --help, generated from the settings classes
plugins.py   Python modules that the user adds with plugin=MODULE
tables.py    prints a ledger as a table on the terminal
scalars.py   writes TensorBoard scalars (named numbers) to RUN/tensorboard
tracking.py  sends the same numbers to Weights & Biases
"""
