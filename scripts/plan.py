"""The command `hfgolf plan`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="plan")
