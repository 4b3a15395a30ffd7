"""The command `hfgolf report`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
