"""Run `alma-prep` as `python -m data_prep`."""

import sys

from data_prep.cli import main

# Worker processes import this module under another name, so they do not run the command again.
if __name__ == "__main__":
    sys.exit(main())
