"""Commit, uncommitted changes and environment: complete enough to repeat a run, and without secrets."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfgolf.config.parse import load_config
from hfgolf.run import provenance
from hfgolf.train.console import show_log

ROOT = Path(__file__).parents[2]
HF_TOKEN = "hf_" + "aB3dE" * 7
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"
CREDENTIALS = "somebody:" + "opensesame"


def test_metadata_has_the_commit_of_an_image(monkeypatch):
    def no_git(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(provenance.subprocess, "run", no_git)
    monkeypatch.setenv("HFGOLF_COMMIT", "0123abc")
    assert provenance.run_metadata(load_config(["--train.max_steps=1"]))["commit"] == "0123abc"


@pytest.fixture
def logged_in(monkeypatch):
    """Give this process a Hub token, a wandb key, and a config with a password in a URL."""
    monkeypatch.setenv("HF_TOKEN", HF_TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"https://{CREDENTIALS}@wandb.example")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SLURM_JOB_NAME", f"job of {HF_TOKEN}")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--hub.repo_id={HF_TOKEN}", f"https://{CREDENTIALS}@host/a.txt"])
    return load_config(["--train.max_steps=1", "--data.source=files", f"--data.files=https://{CREDENTIALS}@host/a.txt"])


def test_metadata_has_environment_and_config_without_secrets(logged_in):
    metadata = provenance.run_metadata(logged_in)
    written = json.dumps(metadata)
    assert not [secret for secret in (HF_TOKEN, WANDB_KEY, "opensesame") if secret in written]
    variables = metadata["environment"]
    assert variables["NCCL_DEBUG"] == "WARN" and variables["SLURM_JOB_NAME"] == "job of [redacted]"
    assert variables["WANDB_BASE_URL"] == "https://[redacted]@wandb.example"
    assert not {"HF_TOKEN", "WANDB_API_KEY", "PATH"} & set(variables)
    assert metadata["command"][1:] == ["train.py", "--hub.repo_id=[redacted]", "https://[redacted]@host/a.txt"]
    assert metadata["config"]["data.files"] == ["https://[redacted]@host/a.txt"]
    assert metadata["config"]["model.hidden_size"] == logged_in.config.model.hidden_size
    assert metadata["sources"]["data.files"] == "command line" and "model.hidden_size" not in metadata["sources"]


def test_log_contains_no_secret(logged_in, capsys, monkeypatch):
    logger = logging.getLogger("hfgolf")
    for attribute in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    show_log(is_main_process=True)
    logger.info("plain words")
    logger.info("token %s", HF_TOKEN)
    logger.warning("https://%s:%s@host", *CREDENTIALS.split(":"))  # a secret only after formatting
    try:
        raise ConnectionError(f"{WANDB_KEY} is refused")
    except ConnectionError:
        logger.exception("dropped")
    out = capsys.readouterr().out
    assert out.startswith("plain words\ntoken [redacted]\nhttps://[redacted]@host\ndropped\nTraceback")
    assert out.endswith("ConnectionError: [redacted] is refused\n")


@pytest.fixture
def repository(tmp_path):
    """A git repository with one commit, changed, added and deleted files, and unusual settings."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    git(root, "config", "diff.noprefix", "true")
    git(root, "config", "color.ui", "always")
    git(root, "config", "diff.external", "true")  # replaces the diff with nothing
    git(root, "config", "diff.summary.textconv", "wc")
    (root / "package").mkdir()
    (root / "package" / "kept.py").write_text("a = 1\nb = 2\nc = 3\n")
    (root / "package" / "gone.py").write_text("gone\n")
    (root / "windows.txt").write_bytes(b"one\r\ntwo\r\n")
    (root / "picture.bin").write_bytes(bytes(range(256)))
    (root / ".gitignore").write_text("ignored*\n")
    (root / ".gitattributes").write_text("windows.txt diff=summary\n")
    git(root, "add", ".")
    git(root, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "first")
    return root


def git(folder, *arguments, **options):
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, **options)


def contents(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_patch_reproduces_the_changed_checkout(repository, tmp_path):
    assert provenance.uncommitted_changes(repository / "package") is None
    clean = tmp_path / "clean"
    git(tmp_path, "clone", "-q", repository, clean)
    (repository / "package" / "kept.py").write_text("a = 1\nb = 'zwölf'\nc = 3")
    (repository / "package" / "gone.py").unlink()
    (repository / "windows.txt").write_bytes(b"one\r\ntwo and a half\r\n")
    (repository / "picture.bin").write_bytes(bytes(reversed(range(256))))
    (repository / "staged.py").write_text("staged\n")
    git(repository, "add", "staged.py")
    (repository / "package" / "new file.py").write_text("no newline at the end")
    (repository / "empty.py").touch()
    os.utime(repository / ".gitignore", (0, 0))  # looks changed but is not
    patch = provenance.uncommitted_changes(repository / "package")
    (tmp_path / "uncommitted.patch").write_text(patch, encoding="utf-8")
    git(clean, "apply", tmp_path / "uncommitted.patch")
    assert contents(clean) == contents(repository)


def test_patch_has_new_code_and_configs_but_no_texts_and_nothing_ignored_hidden_or_binary(repository):
    """What someone trains on, or their notes, are no part of the code; a config of theirs is."""
    for name in ("my.txt", "notes.md", "chat.jsonl", "table.csv", "letters", "package/diary.txt"):
        (repository / name).write_text("dear diary\n")
    for name in ("ignored.py", ".env", ".hidden.py", "binary.py"):
        (repository / name).write_bytes(b"\0" if name == "binary.py" else b"text\n")
    assert provenance.uncommitted_changes(repository) is None
    (repository / "mine.yaml").write_text("data: {files: [my.txt]}\n")
    patch = provenance.uncommitted_changes(repository)
    assert patch.count("diff --git") == 1 and "+data: {files: [my.txt]}\n" in patch


def test_patch_contains_no_secret(repository, logged_in):
    (repository / "package" / "kept.py").write_text(f"a = 1\nb = '{HF_TOKEN}'\nc = 3\n")
    (repository / "new.sh").write_text(f"curl https://{CREDENTIALS}@host -H {WANDB_KEY}\n")
    patch = provenance.uncommitted_changes(repository)
    assert "\n+b = '[redacted]'\n" in patch and "\n+curl https://[redacted]@host -H [redacted]\n" in patch
    assert not [secret for secret in (HF_TOKEN, WANDB_KEY, "opensesame") if secret in patch]


def test_oversized_patch_names_what_it_omits(repository, monkeypatch):
    monkeypatch.setattr(provenance, "MAX_PATCH_BYTES", 2000)
    (repository / "many.yaml").write_text("word\n" * 1000)
    (repository / "small.py").write_text("x = 1\n")
    patch = provenance.uncommitted_changes(repository)
    assert patch.startswith("# omitted, too large for this patch: many.yaml\ndiff --git")
    assert "\n+x = 1\n" in patch and "word" not in patch
    git(repository, "apply", "--check", "--reverse", "-", input=patch.encode())
    (repository / "windows.txt").write_text("more\n" * 1000)
    patch = provenance.uncommitted_changes(repository)
    assert patch.startswith("# omitted, too large for this patch: the changes to tracked files, many.yaml\ndiff")
    monkeypatch.setattr(provenance, "MAX_NEW_FILES", 0)
    assert provenance.uncommitted_changes(repository) == (
        "# omitted, too large for this patch: the changes to tracked files, many.yaml, small.py\n"
    )


def test_checkout_around_an_installed_package_is_ignored(repository, monkeypatch, tmp_path):
    installed = repository / "ignored-venv" / "hfgolf"
    installed.mkdir(parents=True)
    (repository / "windows.txt").write_text("changed")
    assert provenance.uncommitted_changes(installed) is None
    assert provenance.uncommitted_changes(tmp_path) is None
    monkeypatch.delenv("HFGOLF_COMMIT", raising=False)
    assert provenance.git_commit(installed) is None
    head = git(repository, "rev-parse", "HEAD", text=True).stdout.strip()
    assert provenance.git_commit(repository / "package") == f"{head}-dirty"


def test_package_that_is_only_on_the_path_has_no_version(monkeypatch):
    def missing(package: str) -> str:
        raise provenance.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(provenance.importlib.metadata, "version", missing)
    assert provenance.run_metadata(load_config(["--train.max_steps=1"]))["packages"]["hfgolf"] is None


def test_command_of_a_notebook_does_not_name_files_of_its_kernel(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["site-packages/ipykernel_launcher.py", "-f", "kernel-1.json"])
    assert provenance.run_metadata(load_config("small"))["command"] == ["hfgolf.fit", "in a notebook"]
