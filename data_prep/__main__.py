"""Run `alma-prep` as `python -m data_prep`."""

import sys

from data_prep.cli import main

if __name__ == "__main__":  # false in worker processes, which import this module but must not run the command
    sys.exit(main())
