"""The command `hfgolf evaluate`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
