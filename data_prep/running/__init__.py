"""Divide steps into tasks, and run the tasks in processes or Slurm jobs, so that a killed run can be continued."""
