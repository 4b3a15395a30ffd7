"""The command `hfgolf generate`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="generate")
