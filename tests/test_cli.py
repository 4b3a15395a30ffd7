"""The command `hfgolf`: its verbs, the shipped configs by name, and what a wheel of it contains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hfgolf.cli import VERBS, main
from hfgolf.command_line import find_config, load_config
from hfgolf.run.provenance import run_metadata

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hfgolf(monkeypatch, capsys):
    """Return a function that runs the command in this process: (status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hfgolf"])
        with pytest.raises(SystemExit) as exit_:
            main([*map(str, arguments)])
        return int(exit_.value.code or 0), *capsys.readouterr()

    return run


def test_help_lists_every_verb_and_imports_nothing_heavy(hfgolf):
    status, out, _ = hfgolf("--help")
    assert status == 0 and [verb for verb in VERBS if f"  {verb} " not in out] == []
    program = "import sys, hfgolf.cli; print([m for m in ('torch', 'numpy', 'jsonargparse') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_script_has_a_verb():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {script for script, _ in VERBS.values()} == scripts - {"ladder"}  # it needs benchmarks/, which don't ship


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_help_under_its_own_name(hfgolf, verb):
    status, out, _ = hfgolf(*verb.split(), "--help")
    assert status == 0 and f"usage: hfgolf {verb} [-" in " ".join(out.split())


def test_golf_lists_its_verbs(hfgolf):
    status, out, _ = hfgolf("golf")
    assert status == 0 and "golf export" in out and "roofline" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "error: hfgolf: there is no command trian; did you mean train?\n"),
        (["xyzzy"], "error: hfgolf: there is no command xyzzy; `hfgolf --help` lists the commands.\n"),
        (["golf", "exprt"], "error: hfgolf: there is no command golf exprt; did you mean golf export?\n"),
    ],
)
def test_an_unknown_verb_is_one_line(hfgolf, arguments, said):
    assert hfgolf(*arguments) == (2, "", said)


def test_train_without_arguments_says_what_to_give_it(hfgolf, run_script):
    status, out, err = hfgolf("train")
    assert (status, out) == (2, "") and "\n  hfgolf train --config small\n" in err
    assert f"\n  python {ROOT / 'scripts/train.py'} --config small\n" in run_script("train.py").err


def test_a_bare_name_is_a_shipped_config_unless_such_a_file_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(["--config", "small"]) == load_config(["--config", str(ROOT / "configs" / "small.yaml")])
    assert find_config("configs/small.yaml") == "configs/small.yaml"  # a path stays a path
    Path("small").write_text("train: {max_steps: 3}")
    assert load_config(["--config", "small"]).config.train.max_steps == 3


def test_the_record_of_a_run_shows_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hfgolf train", "--config", "small"])
    assert run_metadata(load_config(["--config", "small"]), {})["command"] == ["hfgolf", "train", "--config", "small"]


@pytest.mark.slow
def test_a_wheel_works_from_any_folder(tmp_path):
    """Installed into a folder of its own, without a checkout: the verbs, the configs, the first line in time."""
    source = tmp_path / "source"
    for name in ("hfgolf", "scripts", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(wheel, check=True, timeout=120)
    (built,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(built).extractall(installed)
    assert "hfgolf = hfgolf.cli:main" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    shutil.rmtree(source)

    def hfgolf(*arguments: str) -> str:
        program = f"import sys; sys.path.insert(0, {str(installed)!r}); import hfgolf.cli; hfgolf.cli.main()"
        command = [sys.executable, "-P", "-c", program, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "find_lr" in hfgolf()
    assert "max_steps: 150" in hfgolf("train", "--config", "small", "--print_config")
    packed = zipfile.ZipFile(built).namelist()
    assert {"hfgolf/configs/small.yaml", "hfgolf/configs/accelerate/ddp.yaml", "hfgolf/scripts/train.py"} <= {*packed}
