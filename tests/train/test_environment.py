"""Which precision, how many threads, which commit: every answer with its source, and none with a secret."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfgolf.command_line import load_config
from hfgolf.errors import UserError
from hfgolf.model import causal_blocks
from hfgolf.run.metrics import read_rows
from hfgolf.train import environment
from hfgolf.train.compilation import should_compile
from hfgolf.train.console import show_log

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def resolved(*arguments: str):
    return environment.resolve_precision(load_config(["--train.max_steps=1", *arguments]))


@pytest.fixture
def launched_by(monkeypatch, tmp_path):
    """Pretend that `accelerate launch` with these words started this process and exported this precision."""

    def pretend(precision: str, *words: str) -> None:
        from accelerate.commands.config import config_args

        class Parent:
            def parent(self):
                return self

            def cmdline(self):
                return ["accelerate", "launch", *words]

        monkeypatch.setattr(environment.psutil, "Process", Parent)
        monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)

    return pretend


@pytest.mark.parametrize(
    ("precision", "words", "outcome", "source"),
    [
        ("bf16", (), "bf16", "accelerate"),
        ("no", ("--mixed_precision", "no"), "no", "accelerate"),
        ("no", ("--config_file", "x.yaml"), "no", "accelerate"),
        ("no", (), "bf16", "auto"),
    ],
)
def test_what_accelerate_was_told_wins_over_the_hardware(launched_by, monkeypatch, precision, words, outcome, source):
    monkeypatch.setattr(environment, "fast_product_dtype", lambda device: torch.bfloat16)
    launched_by(precision, *words)
    answer = resolved()
    assert answer.config.train.mixed_precision == outcome
    assert answer.sources["train.mixed_precision"] == source


def test_the_config_wins_over_accelerate(launched_by):
    launched_by("no", "--mixed_precision", "no")
    answer = resolved("--train.mixed_precision=bf16")
    assert (answer.config.train.mixed_precision, answer.sources["train.mixed_precision"]) == ("bf16", "command line")


@pytest.mark.parametrize(("fast", "outcome"), [(torch.bfloat16, "bf16"), (torch.float32, "no")])
def test_without_a_word_the_hardware_decides(monkeypatch, fast, outcome):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(environment, "fast_product_dtype", lambda device: fast)
    assert resolved().config.train.mixed_precision == outcome


def test_a_precision_from_accelerate_that_does_not_exist_here_is_one_line(launched_by):
    launched_by("fp8")
    with pytest.raises(UserError, match=r"train.mixed_precision: fp8 \(from accelerate\) does not run on this device"):
        resolved()


def test_cores_are_shared_over_processes(monkeypatch):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    before = torch.get_num_threads()
    try:
        assert [environment.set_cpu_threads("auto", processes) for processes in (1, 2, 4, 12)] == [6, 3, 1, 1]
        assert environment.set_cpu_threads(2, 1) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_seeds_reach_every_generator(monkeypatch):
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    environment.seed_everything(7)
    first = draw()
    environment.seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    environment.seed_everything(7)
    assert draw() == first
    of_gpus = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", of_gpus.append)
    environment.seed_everything(7)
    assert of_gpus == [7]


def test_the_commit_of_an_image_is_in_the_metadata(monkeypatch):
    def no_git(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(environment.subprocess, "run", no_git)
    monkeypatch.setenv("HFGOLF_COMMIT", "0123abc")
    assert environment.run_metadata(load_config(["--train.max_steps=1"]))["commit"] == "0123abc"


HF_TOKEN = "hf_" + "aB3dE" * 7
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"
CREDENTIALS = "somebody:" + "opensesame"


@pytest.fixture
def logged_in(monkeypatch):
    """Give this process a token of the Hub, a key of wandb, and a config whose URL holds a password."""
    monkeypatch.setenv("HF_TOKEN", HF_TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"https://{CREDENTIALS}@wandb.example")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SLURM_JOB_NAME", f"job of {HF_TOKEN}")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--hub.repo_id={HF_TOKEN}", f"https://{CREDENTIALS}@host/a.txt"])
    return load_config(["--train.max_steps=1", "--data.source=files", f"--data.files=https://{CREDENTIALS}@host/a.txt"])


def test_the_metadata_tells_the_environment_and_the_config_without_secrets(logged_in):
    metadata = environment.run_metadata(logged_in)
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


def test_no_line_of_the_log_tells_a_secret(logged_in, capsys, monkeypatch):
    logger = logging.getLogger("hfgolf")
    for attribute in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    show_log(is_main_process=True)
    logger.info("plain words")
    logger.info("token %s", HF_TOKEN)
    logger.warning("https://%s:%s@host", *CREDENTIALS.split(":"))  # a secret only once it is put together
    try:
        raise ConnectionError(f"{WANDB_KEY} is refused")
    except ConnectionError:
        logger.exception("dropped")
    out = capsys.readouterr().out
    assert out.startswith("plain words\ntoken [redacted]\nhttps://[redacted]@host\ndropped\nTraceback")
    assert out.endswith("ConnectionError: [redacted] is refused\n")


@pytest.fixture
def repository(tmp_path):
    """A git repository with one commit, in which a file is changed and files come and go; its own settings are odd."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    git(root, "config", "diff.noprefix", "true")
    git(root, "config", "color.ui", "always")
    git(root, "config", "diff.external", "true")  # prints nothing
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


def test_the_patch_makes_the_changed_checkout_of_a_clean_one(repository, tmp_path):
    assert environment.uncommitted_changes(repository / "package") is None
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
    os.utime(repository / ".gitignore", (0, 0))  # looks changed, and is not
    patch = environment.uncommitted_changes(repository / "package")
    (tmp_path / "uncommitted.patch").write_text(patch, encoding="utf-8")
    git(clean, "apply", tmp_path / "uncommitted.patch")
    assert contents(clean) == contents(repository)


def test_the_patch_leaves_out_what_is_ignored_hidden_or_no_text(repository):
    for name in ("ignored.py", ".env", "weights.bin"):
        (repository / name).write_bytes(b"\0" if name == "weights.bin" else b"text\n")
    assert environment.uncommitted_changes(repository) is None


def test_the_patch_tells_no_secret(repository, logged_in):
    (repository / "package" / "kept.py").write_text(f"a = 1\nb = '{HF_TOKEN}'\nc = 3\n")
    (repository / "new.sh").write_text(f"curl https://{CREDENTIALS}@host -H {WANDB_KEY}\n")
    patch = environment.uncommitted_changes(repository)
    assert "\n+b = '[redacted]'\n" in patch and "\n+curl https://[redacted]@host -H [redacted]\n" in patch
    assert not [secret for secret in (HF_TOKEN, WANDB_KEY, "opensesame") if secret in patch]


def test_a_patch_that_would_be_too_large_names_what_it_lacks(repository, monkeypatch):
    monkeypatch.setattr(environment, "MOST_PATCH_BYTES", 2000)
    (repository / "corpus.txt").write_text("word\n" * 1000)
    (repository / "small.py").write_text("x = 1\n")
    patch = environment.uncommitted_changes(repository)
    assert patch.startswith("# left out, too large for this patch: corpus.txt\ndiff --git")
    assert "\n+x = 1\n" in patch and "word" not in patch
    git(repository, "apply", "--check", "--reverse", "-", input=patch.encode())
    (repository / "windows.txt").write_text("more\n" * 1000)
    patch = environment.uncommitted_changes(repository)
    assert patch.startswith("# left out, too large for this patch: the changes to tracked files, corpus.txt\ndiff")
    monkeypatch.setattr(environment, "_MOST_NEW_FILES", 0)
    assert environment.uncommitted_changes(repository) == (
        "# left out, too large for this patch: the changes to tracked files, corpus.txt, small.py\n"
    )


def test_another_checkout_around_an_installed_hfgolf_is_not_its_own(repository, monkeypatch, tmp_path):
    installed = repository / "ignored-venv" / "hfgolf"
    installed.mkdir(parents=True)
    (installed / "environment.py").touch()
    (repository / "windows.txt").write_text("changed")
    assert environment.uncommitted_changes(installed) is None
    assert environment.uncommitted_changes(tmp_path) is None
    monkeypatch.setattr(environment, "__file__", str(installed / "environment.py"))
    monkeypatch.delenv("HFGOLF_COMMIT", raising=False)
    assert environment.git_commit() is None
    monkeypatch.setattr(environment, "__file__", str(repository / "package" / "kept.py"))
    head = git(repository, "rev-parse", "HEAD", text=True).stdout.strip()
    assert environment.git_commit() == f"{head}-dirty"


def test_fp32_is_no_tf32(run, tiny_run):
    run(tiny_run(train__max_steps=1))
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32


def test_compiling_must_pay(monkeypatch):
    monkeypatch.setattr("hfgolf.train.compilation.has_compiler", lambda device: True)
    assert should_compile(CPU, "no", 3600.0)[0]
    assert not should_compile(CPU, "no", 60.0)[0]
    assert should_compile(CPU, "bf16", 100.0)[0]  # uncompiled 250 s, of which it saves 50
    assert not should_compile(CPU, "bf16", 100.0, most_seconds=90.0)[0]
    assert not should_compile(CPU, "bf16", 20.0)[0]
    monkeypatch.setattr("hfgolf.train.compilation.has_compiler", lambda device: False)
    assert should_compile(CPU, "no", 3600.0) == (False, "there is no compiler for this device")


@pytest.mark.slow
def test_accelerate_launch_trains_with_what_it_was_told_and_with_all_cores(tiny_run, tmp_path):
    options = [option for option in tiny_run() if "mixed_precision" not in option and "cpu_threads" not in option]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "bf16", "scripts/train.py"]
    variables = {"HF_HOME": str(tmp_path)}
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run([*accelerate, *options], cwd=ROOT, env=clean | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert f"1 process, {cores} threads each" in done.stdout
    assert "precision: bf16 (accelerate)" in done.stdout
    assert "attention: causal_blocks, q, k and v in torch.bfloat16" in done.stdout
    config = (tmp_path / "runs" / "tiny" / "config.yaml").read_text()
    assert "  mixed_precision: bf16  # accelerate" in config.splitlines()


@pytest.mark.slow
def test_a_failing_compiler_falls_back_with_one_line(run, tiny_run, caplog):
    import torch._inductor.config

    eager = run(tiny_run(run__name="eager", train__max_steps=3))
    # not by monkeypatch: it would end by deleting the settings, for the tests that follow, too
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        compiled = run(tiny_run(run__name="compiled", train__max_steps=3, train__compile="true"))
    lines = [line for line in caplog.messages if line.startswith("compile: failed, going on without")]
    assert len(lines) == 1 and "\n" not in lines[0]
    losses = [[row["train_loss"] for row in read_rows(f / "metrics.jsonl")] for f in (eager, compiled)]
    assert losses[0] == losses[1]


@pytest.mark.distributed
def test_asking_for_the_precision_does_not_part_the_processes():
    """The first PartialState of a process settles whether it is one of several, and this is the first."""
    program = (
        "from accelerate import Accelerator, PartialState; from hfgolf.command_line import load_config;"
        "from hfgolf.train.environment import resolve_precision;"
        "resolve_precision(load_config(['--train.max_steps=1']));"
        "import os; os.write(1, b'%d processes ' % Accelerator().num_processes); PartialState().destroy_process_group()"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes") == 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to")
def test_freed_memory_is_there_for_the_next_step():
    """Without it, each round would fault 50 MB in anew: 12,000 pages."""
    program = (
        "import resource, sys, torch\n"
        "from hfgolf.train.environment import tune_memory\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(50 * 2**18)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "returned = [faults() for _ in range(4)]\n"
        "tune_memory()\n"
        "kept = [faults() for _ in range(8)]\n"
        "print(min(returned), sorted(kept)[4])\n"  # the heap may have to grow a second time
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=without_large_pages()
    )
    returned, kept = map(int, done.stdout.split())
    assert returned > 1000 and kept < 100


def without_large_pages() -> dict[str, str]:
    """Return this environment as it was before any test set up a run."""
    return {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="no large pages here")
def test_large_tensors_lie_in_large_pages():
    program = (
        "import torch\n"
        "import hfgolf.train.loop\n"  # whose imports must not have torch decide before
        "from pathlib import Path\n"
        "from hfgolf.train.environment import tune_memory\n"
        "tune_memory()\n"
        "x = torch.ones(2**24)\n"
        "pages = Path('/proc/self/smaps_rollup').read_text()\n"
        "print(pages.split('AnonHugePages:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=without_large_pages()
    )
    assert int(done.stdout) > 0.9 * 2**16  # kB, of 64 MB


@pytest.mark.parametrize(
    ("dropout", "words"),
    [(0.0, "sdpa, SDPA's flash kernel, q, k and v in "), (0.1, "sdpa, SDPA's math kernel, q, k and v in ")],
)
def test_the_log_says_what_attention_got(run, tiny_run, monkeypatch, caplog, dropout, words):
    """Also if it casts q, k and v itself, after autocast and the projection."""
    options = {"model__attention_dropout": dropout, "train__max_steps": 1}
    with caplog.at_level(logging.INFO, "hfgolf"):
        run(tiny_run(**options))
        assert f"attention: {words}torch.float32" in caplog.messages
        caplog.clear()
        real = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def in_double(module, query, key, value, *arguments, **settings):
            output, weights = real(module, query.double(), key.double(), value.double(), *arguments, **settings)
            return output.to(query.dtype), weights

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", in_double)
        run(tiny_run(run__name="double", **options))
        assert f"attention: {words}torch.float64" in caplog.messages


def test_a_cast_to_fp32_inside_attention_shows_under_bf16(run, tiny_run, monkeypatch, caplog):
    def in_fp32(query, key, value, *arguments):
        with torch.autocast("cpu", enabled=False):
            return real(query.float(), key.float(), value.float(), *arguments).to(query.dtype)

    real = causal_blocks.causal_blocks
    with caplog.at_level(logging.INFO, "hfgolf"):
        run(tiny_run(train__mixed_precision="bf16", train__max_steps=1))
        assert "attention: causal_blocks, q, k and v in torch.bfloat16" in caplog.messages
        caplog.clear()
        monkeypatch.setattr(causal_blocks, "causal_blocks", in_fp32)
        run(tiny_run(run__name="cast", train__mixed_precision="bf16", train__max_steps=1))
        assert "attention: causal_blocks, q, k and v in torch.float32" in caplog.messages
