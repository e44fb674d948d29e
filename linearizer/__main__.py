"""`python -m linearizer` is the command line."""

import sys

from linearizer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
