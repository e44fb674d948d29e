"""The page, as a Space runs it and as `python app.py` does; `linearizer app` is the same."""

import sys

from linearizer.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["app"]))
