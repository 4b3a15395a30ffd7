"""The command `hfgolf golf score`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["golf", "score", *sys.argv[1:]])
