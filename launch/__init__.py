"""Processes on this machine (local.py), Slurm jobs (row.sbatch) and the set-up of .venv (setup.sh)."""
