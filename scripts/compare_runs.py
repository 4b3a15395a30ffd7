"""The command `hfgolf compare`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
