"""Where processes run: here (local.py). Knows nothing of what they compute."""
