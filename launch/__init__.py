"""Start processes on this machine (local.py), submit Slurm jobs (row.sbatch), and create .venv (setup.sh)."""
