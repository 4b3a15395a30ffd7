"""What all scripts' options share: no output replaces what is the user's, and everything written says who wrote it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hfgolf.commands.options import MARK, ScriptParser, bounded_bytes, check_output
from hfgolf.config.parse import load_config
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "options", "mine"),
    [
        ("report", ["RUN", "--output", "OUT/mine.html"], "mine.html"),
        ("report", ["RUN", "--output", "OUT/mine.html"], "mine/loss.png"),
        ("report", ["RUN", "RUN"], "report/loss.png"),
        ("schedule", ["--train.max_steps=9", "--output", "OUT/mine.png"], "mine.png"),
        ("find_lr", ["--train.max_steps=9", "--output", "OUT/mine.png"], "mine.png"),
        ("find_lr", ["--train.max_steps=9", "--output", "OUT/mine.png"], "mine.json"),
        ("roofline.py", ["--train.max_steps=9", "--output", "OUT"], "roofline.json"),
        ("ladder.py", ["--train.max_steps=9", "--output", "OUT"], "ladder.png"),
        ("profile", ["--train.max_steps=9", "--output", "OUT"], "profile.json"),
        ("vocabulary_study.py", ["--files", "TEXT", "--output", "OUT"], "vocabulary.md"),
        ("compare", ["RUN", "RUN", "--output_dir", "OUT"], "OUT.md"),
    ],
)
def test_no_output_replaces_what_hfgolf_did_not_write(run_script, tmp_path, monkeypatch, script, options, mine):
    places = {"OUT": tmp_path / "out", "RUN": tmp_path / "run", "TEXT": tmp_path / "text.txt"}
    mine = places["OUT"] / mine.replace("OUT", places["OUT"].name)
    mine.parent.mkdir(parents=True)
    mine.write_text("what I wrote")
    monkeypatch.chdir(places["OUT"])
    places["RUN"].mkdir()
    places["TEXT"].write_text("some text")
    for word, place in places.items():
        options = [re.sub(rf"^{word}\b", str(place), option) for option in options]
    ended = run_script(script, *options)
    assert ended.status == 2 and mine.read_text() == "what I wrote"
    assert ended.err.endswith(f"{mine.name} exists and hfgolf did not write it; move it, or choose another name.\n")
    assert ended.err.startswith("error: --") and ended.err.count("\n") == 1


def test_every_command_with_an_output_checks_it_before_any_work():
    for script in [*(ROOT / "hfgolf" / "commands").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        text = script.read_text(encoding="utf-8")
        if "ScriptParser" in text and '"--output' in text:
            assert re.search(r"check_(output|picture)\(|already exists|no export wrote it", text), script.name


def test_a_refused_command_leaves_no_folder(tmp_path):
    (tmp_path / "my.txt").write_text("To be")
    command = [sys.executable, "-m", "hfgolf", "compare", "my.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no run my.txt" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


def test_what_hfgolf_wrote_is_replaced(tmp_path):
    page, numbers = tmp_path / "page.md", tmp_path / "page.json"
    page.write_text(f"# A page\n\n{MARK}\n")
    numbers.write_text('{"written_by": "hfgolf"}')
    assert check_output("--output", page, ["md"], [numbers]) == page
    numbers.write_text("{}")
    with pytest.raises(UserError, match=r"page\.json exists"):
        check_output("--output", page, ["md"], [numbers])
    page.write_text("# What I think of hfgolf\n")
    with pytest.raises(UserError, match=r"page\.md exists"):
        check_output("--output", page, ["md"])


def test_pictures_say_who_drew_them(tmp_path):
    from matplotlib.figure import Figure

    from hfgolf import palette

    for kind in ("png", "svg", "pdf"):
        palette.save(Figure(), tmp_path / f"picture.{kind}")
        palette.save(Figure(), check_output("--output", tmp_path / f"picture.{kind}", [kind]))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("60000", 60_000), ("60kB", 60_000), ("60 kB", 60_000), ("64KiB", 65_536), ("1.5MB", 1_500_000)),
        *((text, None) for text in ("1.5", "60xB", "0kB", "-5kB", "kB", "", "2PB")),
    ],
)
def test_bytes_may_have_a_unit_in_options_and_in_configs(text, number):
    parser, key = ScriptParser(""), "golf.budget_bytes"
    parser.add_argument("--bytes", **bounded_bytes(1, 10**15, "what it may take"))
    for read in (
        lambda: parser.parse_args([f"--bytes={text}"]).bytes,
        lambda: load_config(["--config=small", f"--{key}={text}"]).config.golf.budget_bytes,
    ):
        if number is None:
            with pytest.raises(UserError, match="allowed: 1 to 10"):
                read()
        else:
            assert read() == number
