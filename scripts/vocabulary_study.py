"""Moved to benchmarks/vocabulary_study.py, which this runs."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "vocabulary_study.py"), run_name="__main__")
