"""The command `hfgolf evaluate`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="evaluate")
