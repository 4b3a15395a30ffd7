"""`python -m hfgolf`: the command of cli.py, also for `accelerate launch -m hfgolf train ...`."""

from hfgolf.cli import main

if __name__ == "__main__":
    main()
