"""The command `hfgolf golf plan`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["golf", "plan", *sys.argv[1:]])
