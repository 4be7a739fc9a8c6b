"""Start processes on this machine, submit Slurm jobs (slurm.py and the scripts), and create .venv (setup.sh)."""
