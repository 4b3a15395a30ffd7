"""datatrove's executors build the cache that one process builds, whatever becomes of a task: `make test-ecosystem`.

Stand-ins take the place of SLURM's commands: the sbatch runs the script that datatrove wrote, each task of its array.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfgolf.config import DataConfig, TokenizerConfig
from hfgolf.data.token_cache import load_tokens
from hfgolf.errors import UserError

pytest.importorskip("datatrove", reason="datatrove is not installed; run make test-ecosystem")
from hfgolf.data import datatrove_tasks
from hfgolf.data.datatrove_tasks import WritePart, parse_slurm, tokenize_in_tasks

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
BPE = TokenizerConfig(kind="bpe", vocab_size=300)
SBATCH = """#!/bin/bash
script=${!#}
job=$(( $(ls "$STATE"/job-*.sh 2> /dev/null | wc -l) + 1 ))
cp "$script" "$STATE/job-$job.sh"
echo "$@" > "$STATE/job-$job.arguments"
for before in $(sed -n 's/.*afterok:\\([0-9]*\\).*/\\1/p' "$STATE/job-$job.arguments" "$script"); do
    [ -e "$STATE/failed-$before" ] && touch "$STATE/failed-$job" && echo "Submitted batch job $job" && exit
done
for task in $(seq 0 "$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")"); do
    if [ "$task" = "$LOST_TASK" ] && [ "$job" = 1 ]; then touch "$STATE/failed-$job"; continue; fi  # its node died
    export SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=$job SLURM_NODELIST=node
    bash "$script" > "$STATE/job-$job-$task.output" 2>&1 || touch "$STATE/failed-$job"
done
echo "Submitted batch job $job"
"""
SRUN = """#!/bin/bash
shift 3  # -l -n 1
exec "$@"
"""


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """jsonl, txt and gz, with enough rows that both splits have some in each task."""
    folder = tmp_path / "text"
    folder.mkdir()
    rows = [json.dumps({"text": f"row {number}: naïve\r\n{number**3} 🌍 <|endoftext|>"}) for number in range(90)]
    (folder / "a.jsonl").write_text("\n".join(rows[:30]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[30:60]).encode()))
    (folder / "c.txt").write_text("a long text that is many pieces. " * 3000)
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"packed text " * 500))
    (folder / "e.jsonl").write_text("\n".join(rows[60:]))
    return DataConfig(source="files", files=[str(folder)], val_fraction=0.3, cache_dir=str(tmp_path / "cache"))


def require_same(data: DataConfig, tmp_path: Path, config: TokenizerConfig = BPE) -> None:
    """Compare the cache of the tasks, byte for byte, with one that this process builds."""
    of_tasks = load_tokens(data, config)
    assert of_tasks.is_hit
    of_tasks.check(wait=True)
    whole = load_tokens(DataConfig(**vars(data) | {"cache_dir": str(tmp_path / "whole")}), config)
    assert not whole.is_hit and whole.path.name == of_tasks.path.name
    for path in whole.path.glob("*.arrow"):
        assert (of_tasks.path / path.name).read_bytes() == path.read_bytes(), path.name
    kept = [json.loads((tokens.path / "cache.json").read_text()) for tokens in (whole, of_tasks)]
    assert kept[0] | {"built_at": 0} == kept[1] | {"built_at": 0}
    assert not list((tmp_path / "cache").glob("tasks/*/parts"))


def prepare(data: DataConfig, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"source": "files", "files": data.files, "val_fraction": data.val_fraction, "cache_dir": data.cache_dir}
    words = [f"--data.{key}={value}" for key, value in settings.items()]
    words += ["--tokenizer.kind=bpe", "--tokenizer.vocab_size=300", "--train.max_steps=1"]
    command = [sys.executable, "scripts/prepare_data.py", "--executor", "datatrove", *options, *words]
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=os.environ | path | environment, capture_output=True, text=True)


def test_local_tasks_are_one_process_and_the_terminal_stays_quiet(data, tmp_path):
    done = prepare(data, "--tasks", "4", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "MB/s" in done.stdout and "datatrove: 4 of 4 tasks finished" in done.stdout
    assert done.stderr == "" and len(done.stdout.splitlines()) < 13, done.stdout + done.stderr
    require_same(data, tmp_path)
    (log,) = (tmp_path / "cache").glob("tasks/*/logs/task_00000.log")
    assert "tokenizing train:" in log.read_text()
    stats = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("tasks/*/stats/*.json")]
    counts = [of_task[0]["stats"]["tokens"] for of_task in stats]
    counted = sum(count["total"] for count in counts if count)  # datatrove writes 0 for a task without files
    cache = load_tokens(data, BPE)
    assert counted == len(cache.train) + len(cache.val)


class KilledOnce(WritePart):
    """Tasks 1 and 2 are killed, as if memory had run out, the first time. `runs` lists the tasks that ran."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        runs = self.plan.cache_dir / "runs"
        with runs.open("a") as file:
            file.write(f"{rank}\n")
        if rank in (1, 2) and runs.read_text().split().count(str(rank)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().run(data, rank, world_size)


def test_killed_tasks_are_said_and_only_they_are_repeated(data, tmp_path, monkeypatch):
    monkeypatch.setattr(datatrove_tasks, "WritePart", KilledOnce)
    with pytest.raises(UserError, match=r"2 of 4 tasks failed \([12], [12]\); task [12]: killed by signal 9") as caught:
        tokenize_in_tasks(data, BPE, 4, 2, None)
    assert "\n" not in str(caught.value)
    assert tokenize_in_tasks(data, BPE, 4, 2, None) is True
    assert sorted((tmp_path / "cache" / "runs").read_text().split()) == ["0", "1", "1", "2", "2", "3"]
    require_same(data, tmp_path)
    assert tokenize_in_tasks(data, BPE, 4, 2, None) is False


def test_cache_that_was_deleted_is_built_again(data, tmp_path):
    for _ in range(2):
        assert tokenize_in_tasks(data, BPE, None, None, None) is True
        for path in load_tokens(data, BPE).path.iterdir():
            path.unlink()
    assert tokenize_in_tasks(data, BPE, 3, 1, None) is True
    require_same(data, tmp_path)


def test_file_that_cannot_be_read_is_one_line(data, tmp_path, capfd):
    bad = tmp_path / "text" / "f.txt"
    bad.write_bytes(b"broken \xff")
    with pytest.raises(UserError, match=r"1 of 3 tasks failed \(2\); task 2: .*f\.txt is not UTF-8") as caught:
        tokenize_in_tasks(data, TokenizerConfig(kind="byte"), 3, 2, None)
    assert "\n" not in str(caught.value) and str(tmp_path / "cache" / "tasks") in str(caught.value)
    assert capfd.readouterr().err == ""
    assert "Traceback" in next((tmp_path / "cache").glob("tasks/*/logs/task_00002.log")).read_text()


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has SLURM's commands."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": "#!/bin/bash\necho node\n"}.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    return {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "STATE": str(tmp_path)}


def test_slurm_jobs_are_one_process_and_a_lost_task_is_submitted_again(data, tmp_path, cluster):
    slurm = ("--tasks", "3", "--slurm", "partition=cpu", "time=01:00:00", "account=me", "mem_per_cpu_gb=3")
    lost = prepare(data, *slurm, LOST_TASK="1", **cluster)
    assert lost.returncode == 0, lost.stderr
    assert "submitted 3 of 3 tasks as job 1, and the join of their parts as job" in lost.stdout
    script = (tmp_path / "job-1.sh").read_text()
    for line in ("--partition=cpu", "--time=01:00:00", "--account=me", "--mem-per-cpu=3G", "--array=0-2"):
        assert f"#SBATCH {line}\n" in script
    assert "qos" not in script
    outputs = "".join(path.read_text() for path in tmp_path.glob("job-*.output"))
    assert not list((tmp_path / "cache").glob("tokens/*")), outputs  # the join waits for all tasks
    assert sorted(path.name for path in (tmp_path / "cache").glob("tasks/*/parts/*")) == ["00000", "00002"], outputs

    again = prepare(data, *slurm, **cluster)
    assert "submitted 1 of 3 tasks as job" in again.stdout, again.stderr
    outputs = "".join(path.read_text() for path in tmp_path.glob("job-*.output"))
    assert len(list((tmp_path / "cache").glob("tokens/*"))) == 1, outputs
    require_same(data, tmp_path)
    there = prepare(data, *slurm, **cluster)
    assert "already cached" in there.stdout, there.stderr


@pytest.mark.parametrize(
    "words, problem",
    [
        (["partition=cpu"], "--slurm: time is missing"),
        (["cpu"], "--slurm: cpu is not allowed; allowed: KEY=VALUE"),
        (["partition=cpu", "time=1", "cpus_per_task=all"], "cpus_per_task=all is not allowed; allowed: a whole number"),
        (["partition=cpu", "time=1"], "--slurm: sbatch is not found; start from a machine of the cluster"),
    ],
)
def test_mistakes_in_slurm_options_are_one_line(data, words, problem, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=problem):
        tokenize_in_tasks(data, TokenizerConfig(kind="byte"), 2, None, parse_slurm(words))


def test_job_that_sbatch_refuses_is_one_line(data, cluster, tmp_path, monkeypatch):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho invalid partition >&2; exit 1\n")
    monkeypatch.setenv("PATH", cluster["PATH"])
    with pytest.raises(UserError, match=r"--slurm: sbatch refused the job \(status 1\)"):
        tokenize_in_tasks(data, TokenizerConfig(kind="byte"), 2, None, {"partition": "x", "time": "1"})
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    with pytest.raises(UserError, match="start it from a login node"):
        tokenize_in_tasks(data, TokenizerConfig(kind="byte"), 2, None, {"partition": "x", "time": "1"})


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"source": "hub", "hub_name": "a/b"}, r'data\.files \["hf://datasets'),
        ({"max_documents": 3}, "data.max_documents counts over all files"),
        ({"split": "contiguous"}, "data.split contiguous depends on the length of all files"),
    ],
)
def test_corpora_that_tasks_cannot_share_are_one_line(data, options, problem):
    files = {"files": []} if options.get("source") == "hub" else {}
    with pytest.raises(UserError, match=problem):
        tokenize_in_tasks(DataConfig(**vars(data) | files | options), TokenizerConfig(kind="byte"), 2, 1, None)
