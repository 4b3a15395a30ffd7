"""The command `hfgolf schedule`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["schedule", *sys.argv[1:]])
