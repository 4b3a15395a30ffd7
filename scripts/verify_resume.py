"""The command `hfgolf verify_resume`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="verify_resume")
