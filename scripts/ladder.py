"""Moved to benchmarks/ladder.py, which this runs."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "ladder.py"), run_name="__main__")
