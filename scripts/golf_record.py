"""The command `hfgolf golf record`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["golf", "record", *sys.argv[1:]])
