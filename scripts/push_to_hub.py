"""The command `hfgolf push`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["push", *sys.argv[1:]])
