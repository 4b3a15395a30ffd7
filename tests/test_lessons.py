"""The lessons run from a fresh kernel, and are kept with what they printed and drew.

    python tests/test_lessons.py [01 02 ...]

runs all of them, or some, and keeps their outputs in lessons/ and their pictures in docs/lessons/.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from test_notebook import ROOT, execute, folder, outputs, printed

LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
MAX_CELLS = 15
CELL_SECONDS = 1000  # the longest takes two minutes on a quiet machine

SHORTER = {
    "09_optimizers": ("SEEDS, STEPS = (1, 2, 3), 200", "SEEDS, STEPS = (1, 2, 3), 120"),
    "10_schedules": ("64, 1000, 0.012, (1, 2, 3)", "64, 500, 0.012, (1, 2)"),
}
"""What the longest lessons say of their length, and what the tests train: what they claim holds there, too."""

each_lesson = pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
__all__ = ["folder"]  # a fixture


def read(path: Path) -> Any:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def check(cells: list[Any]) -> None:
    """Check the cells with code, as they were run in order: no error, no warning, one picture, and what was seen."""
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    errors = [f"{error.ename}: {error.evalue}" for cell in cells for error in outputs(cell, "error")]
    assert errors == [], errors
    log = [printed(cell) for cell in cells]
    assert re.search(r"\bexpected\b.*\bseen\b", log[-1])
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) == 1


@each_lesson
def test_each_lesson_is_short_and_kept_as_it_ran(path):
    notebook = read(path)
    assert len(notebook.cells) <= MAX_CELLS
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    check([cell for cell in notebook.cells if cell.cell_type == "code"])
    texts = [cell.source + str(cell.get("outputs")).replace("\\n", "\n") for cell in notebook.cells]
    assert re.findall(r"""[\s"'(=]/\w+/\S*""", "\n".join(texts)) == []  # the path of a machine
    page = (ROOT / "docs" / "lessons.md").read_text()
    assert f"(../lessons/{path.name})" in page and f"(lessons/{path.name[:2]}.png)" in page
    assert (ROOT / "docs" / "lessons" / f"{path.name[:2]}.png").is_file()


@pytest.mark.slow
@pytest.mark.timeout(2 * CELL_SECONDS)
@each_lesson
def test_each_lesson_sees_what_it_claims_on_this_machine(path, folder):
    notebook = read(path)
    if path.stem in SHORTER:
        stated, tested = SHORTER[path.stem]
        (cell,) = (cell for cell in notebook.cells if stated in cell.source)
        cell.source = cell.source.replace(stated, tested)
    check(execute(notebook, folder, CELL_SECONDS))
    assert (folder / "figures" / f"{path.name[:2]}.png").is_file()


def keep(path: Path) -> None:
    """Run a lesson and keep its outputs and its picture; an error of one of its cells changes nothing."""
    import nbformat

    notebook = read(path)
    with tempfile.TemporaryDirectory() as temporary:
        found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # hfgolf's commands, without a path
        os.environ |= {"HF_HOME": temporary, "IPYTHONDIR": temporary, "PATH": found}
        cells = execute(notebook, Path(temporary), CELL_SECONDS)
        check(cells)
        name = f"{path.name[:2]}.png"
        shutil.copy(Path(temporary) / "figures" / name, ROOT / "docs" / "lessons" / name)
    for cell in cells:
        cell.metadata.pop("execution", None)  # when each cell ran: a new commit for nothing
    nbformat.write(notebook, path)
    print(f"kept {path.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    for lesson in LESSONS:
        if not sys.argv[1:] or lesson.name[:2] in sys.argv[1:]:
            keep(lesson)
