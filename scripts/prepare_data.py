"""The command `hfgolf prepare`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
