"""Run the tasks of parts.py on datatrove's executors: on this machine, or on a cluster with SLURM.

Owns datatrove's steps and executors, and what becomes of their logs. datatrove marks finished tasks, so the same
command later runs only the others. Does not know what a task does.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger as datatrove_logger
from transformers import PreTrainedTokenizerFast

from hfgolf.config import DataConfig, TokenizerConfig
from hfgolf.data.corpus import Corpus, load_corpus
from hfgolf.data.files import cache_folder
from hfgolf.data.parts import Plan, join_parts, open_part, write_part
from hfgolf.data.token_cache import BUILDING, build_cache, build_lock, cache_key, find_cache
from hfgolf.data.tokenizer import build_tokenizer, find_tokenizer
from hfgolf.durable import write_text
from hfgolf.errors import UserError
from hfgolf.hardware import cpu_cores
from hfgolf.wording import join_words, one_line

_log = logging.getLogger(__name__)
_BYTES_PER_TASK = 2**30
_NUMBERS = ("cpus_per_task", "mem_per_cpu_gb", "max_array_size", "tasks_per_job")
_TEXTS = ("partition", "time", "qos", "job_name", "env_command", "condaenv", "venv_path", "mail_type", "mail_user")


class _PlannedStep(PipelineStep):
    """A step of datatrove's that knows the plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class WritePart(_PlannedStep):
    """Tokenize one task's share."""

    type, name = "TOKENIZER", "hfgolf"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        with _log_to_datatrove():
            write_part(self.plan, rank)
        streams = open_part(self.plan, rank).values()
        self.stat_update("tokens", value=sum(map(len, streams)), unit="task")
        self.stat_update("bytes", value=sum(stream.num_bytes for stream in streams), unit="task")


class JoinParts(_PlannedStep):
    """Join the parts to the token cache."""

    type, name = "WRITER", "hfgolf token cache"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        with _log_to_datatrove(), build_lock(self.plan.cache_dir):
            _build(self.plan)


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor with a process for each task.

    Its own pool would wait forever for a task that was killed, as the kernel does if memory runs out.
    """

    def run(self) -> None:
        """Run the tasks that are not finished. Raises UserError if one fails, after the others."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports once, not for each task
        waiting = self.get_incomplete_ranks()[::-1]
        num_finished = self.tasks - len(waiting)
        running: dict[Any, tuple[int, Any]] = {}  # by what becomes ready when the process ends
        failed: dict[int, str] = {}
        if num_finished:
            _log.info("datatrove: %d of %d tasks are finished already", num_finished, self.tasks)
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    task = waiting.pop()
                    self.reason_path(task).unlink(missing_ok=True)
                    process = context.Process(target=_run_task, args=(self, task))
                    process.start()
                    running[process.sentinel] = task, process
                for sentinel in wait(list(running)):
                    task, process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        failed[task] = self._reason(task, process.exitcode)
                        _log.warning("datatrove: task %d failed (%s)", task, failed[task])
                        continue
                    num_finished += 1
                    _log.info("datatrove: %d of %d tasks finished", num_finished, self.tasks)
        finally:
            for _, process in running.values():
                process.terminate()
        if failed:
            task, reason = next(iter(failed.items()))
            raise UserError(
                f"--executor: {len(failed)} of {self.tasks} tasks failed ({join_words(map(str, failed), maximum=5)});"
                f" task {task}: {reason} The same command repeats only what did not finish; logs:"
                f" {self.logging_dir.resolve_paths('logs')}."
            )

    def _reason(self, task: int, exitcode: int) -> str:
        if exitcode < 0:
            return f"killed by signal {-exitcode}; if memory ran out, set fewer --workers."
        path = self.reason_path(task)
        return path.read_text("utf-8") if path.is_file() else f"it ended with status {exitcode}."

    def reason_path(self, task: int) -> Path:
        """Return the file in which a task says why it failed."""
        return Path(self.logging_dir.resolve_paths(f"failures-{task:05d}.txt"))


def _run_task(executor: LocalExecutor, task: int) -> None:
    """Run one task in a process of its own, whose output goes to datatrove's log only."""
    os.environ["RAYON_NUM_THREADS"] = str(max(1, cpu_cores() // executor.workers))  # of tokenizers
    datatrove_logger.remove()
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            executor._run_for_rank(task)
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:  # every kind: the launching process reports it
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}."
            write_text(executor.reason_path(task), message)
            sys.exit(1)


@contextmanager
def _log_to_datatrove() -> Iterator[None]:
    """Let hfgolf's log lines go to the log of datatrove's task."""
    log = logging.getLogger("hfgolf")
    handler = logging.Handler()
    handler.emit = lambda record: datatrove_logger.log(record.levelname, record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def tokenize_in_tasks(
    data: DataConfig,
    config: TokenizerConfig,
    tasks: int | None,
    workers: int | None,
    slurm: dict[str, str] | None,
) -> bool | None:
    """Build the token cache in tasks: the same files, byte for byte, that load_tokens builds in one process.

    Return True once it is built, False if it was there, and None if its jobs were submitted to SLURM.

    tasks: how many; None: one for each GB, and at least one for each worker. workers: how many at once; None: one for
    each core, and with SLURM all. slurm: options of SlurmPipelineExecutor and sbatch; None: run on this machine.

    Raises UserError if a task fails, if tasks cannot share the corpus, or if SLURM does not take the jobs.
    """
    _require_files(data)
    options = None if slurm is None else _slurm_options(slurm)
    corpus, cache_dir = load_corpus(data), cache_folder(data).absolute()
    _require_files(corpus.data)  # it is contiguous if the names of a few files don't divide them
    workers = workers or (cpu_cores() if options is None else None)
    if tasks is None:
        num_bytes = sum(state[0] for state in corpus.states)
        tasks = min(len(corpus.files), max(workers or 1, math.ceil(num_bytes / _BYTES_PER_TASK)))
    with build_lock(cache_dir):
        tokenizer = find_tokenizer(config, corpus.identity, cache_dir / "tokenizers")
        if tokenizer is None:
            _log.info("the tokenizer is trained first, in one process, which takes a copy of the text on disk")
            tokenizer = _train_tokenizer(corpus, config, cache_dir)
        if find_cache(corpus, config, cache_dir, tokenizer) is not None:
            return False
        plan = Plan(corpus, config, cache_dir, cache_key(corpus, config, tokenizer), tasks)
        _forget_removed_parts(plan)
        if options is None:
            datatrove_logger.remove()
            executor = LocalExecutor([WritePart(plan)], tasks, min(workers or tasks, tasks), str(plan.folder))
            _build(plan, executor.run)
            return True
    _submit(plan, workers, options)  # without the lock, which the last job takes
    return None


def _require_files(data: DataConfig) -> None:
    """Raise UserError if tasks cannot share the corpus."""
    remedy = "or use --executor local"
    if data.source == "hub":
        raise UserError(
            f'--executor: datatrove reads files; name those of the dataset, data.files ["hf://datasets/...'
            f'/*.parquet"], {remedy}.'
        )
    if data.source == "shards":
        raise UserError("--executor: data.source shards holds tokens already; there is nothing to tokenize.")
    if data.max_documents is not None:
        raise UserError(
            f"--executor: data.max_documents counts over all files, but a task sees only its own; set null, {remedy}."
        )
    if data.split == "contiguous" and not data.val_files:
        raise UserError(
            "--executor: data.split contiguous depends on the length of all files, but a task sees only its own; set"
            f" documents, name data.val_files, {remedy}."
        )


def _train_tokenizer(corpus: Corpus, config: TokenizerConfig, cache_dir: Path) -> PreTrainedTokenizerFast:
    building = cache_dir / BUILDING
    try:
        (cache_dir / "tokenizers").mkdir(exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        return build_tokenizer(
            config, corpus.identity, lambda: corpus.write_pieces(building / "text")["train"], cache_dir / "tokenizers"
        )
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _forget_removed_parts(plan: Plan) -> None:
    """Remove datatrove's marks of finished tasks whose parts are gone: joined to a cache that was deleted, damaged."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for task in plan.missing():
        (plan.folder / "completions" / f"{task:05d}").unlink(missing_ok=True)


def _build(plan: Plan, run_tasks: Callable[[], None] = lambda: None) -> None:
    """Build the token cache from the parts, and remove them. The caller holds the lock."""

    def write(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
        run_tasks()
        return join_parts(plan, folder, tokenizer)

    build_cache(plan.corpus, plan.tokenizer, plan.cache_dir, None, write)
    shutil.rmtree(plan.folder / "parts", ignore_errors=True)


def _slurm_options(stated: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of SlurmPipelineExecutor; those it does not know are sbatch's."""
    missing = [name for name in ("partition", "time") if name not in stated]
    if missing:
        raise UserError(f"--slurm: {missing[0]} is missing; name it, as in --slurm partition=cpu time=04:00:00.")
    options: dict[str, Any] = {name: stated[name] for name in _TEXTS if name in stated}
    for name in set(_NUMBERS) & set(stated):
        if not stated[name].isdecimal() or not int(stated[name]):
            raise UserError(f"--slurm: {name}={stated[name]} is not allowed; allowed: a whole number from 1.")
        options[name] = int(stated[name])
    if not {"env_command", "condaenv", "venv_path"} & set(stated):  # the jobs find the commands of this environment
        options["env_command"] = f'export PATH="{Path(sys.executable).parent}:$PATH"'
    others = {name.replace("_", "-"): value for name, value in stated.items() if name not in (*_TEXTS, *_NUMBERS)}
    # else the join waits forever if a task fails
    return {"qos": None, "job_name": "hfgolf", **options, "sbatch_args": {"kill-on-invalid-dep": "yes", **others}}


def _submit(plan: Plan, workers: int | None, options: dict[str, Any]) -> None:
    """Submit the tasks that are not finished as an array of jobs, and the join that waits for them."""
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        raise UserError("--slurm: this is a task of an array of SLURM jobs; start it from a login node.")
    datatrove_logger.remove()
    tokenize = SlurmPipelineExecutor(
        [WritePart(plan)], plan.tasks, workers=workers or -1, logging_dir=str(plan.folder), **options
    )
    join = SlurmPipelineExecutor(
        [JoinParts(plan)],
        1,
        logging_dir=str(plan.folder / "join"),
        skip_completed=False,
        depends=tokenize,
        **options | {"job_name": f"{options['job_name']}-join"},
    )
    num_left = len(tokenize.get_incomplete_ranks())
    try:
        join.run()
    except FileNotFoundError as error:
        raise UserError(f"--slurm: {error.filename} is not found; start from a machine of the cluster.") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--slurm: sbatch refused the job (status {error.returncode}), for the reason above.") from None
    tasks = f"{num_left} of {plan.tasks} tasks as job {tokenize.job_id}, and " if num_left else ""
    _log.info("submitted %sthe join of their parts as job %s; logs: %s", tasks, join.job_id, plan.folder)


def parse_slurm(words: list[str] | None) -> dict[str, str] | None:
    """Return {key: value} for words such as partition=cpu. Raises UserError for one that is not a pair."""
    if words is None:
        return None
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise UserError(f"--slurm: {word} is not allowed; allowed: KEY=VALUE, as in partition=cpu.")
    return dict(word.split("=", 1) for word in words)
