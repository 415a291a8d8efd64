"""`python -m tether` is the command `tether`."""

import sys

from tether.cli import main

if __name__ == "__main__":
    sys.exit(main())
