"""The command `hfgolf golf export`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["golf", "export", *sys.argv[1:]])
