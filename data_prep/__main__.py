"""Run `alma-prep` as `python -m data_prep`."""

import sys

from data_prep.cli import main

if __name__ == "__main__":  # each worker process imports this module, but must not run the command
    sys.exit(main())
