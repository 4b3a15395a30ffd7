"""Evaluate a model on tasks of lm-eval: what hfgolf evaluate does with --tasks.

Owns what is recorded of the results, and where. lm-eval owns the tasks, the prompts and the metrics.
"""

from __future__ import annotations

import json
import logging
import math
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from hfgolf.commands.evaluate_text import evaluation_precision
from hfgolf.evaluate.context import evaluation_length
from hfgolf.publish.load import load_exported
from hfgolf.publish.model_card import add_task_results
from hfgolf.run.folder import RunFolder
from hfgolf.run.record import read_json
from hfgolf.system.durable import list_files, write_text
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def evaluate_tasks(
    model: str, tasks: list[str], batch_size: int | None, sequence_length: int | None, mixed_precision: str | None
) -> tuple[str, dict[str, dict[str, Any]], str]:
    """Evaluate a model, by what `find_model` takes, on lm-eval's tasks. Code next to the weights never runs.

    tasks: as lm-eval's own command takes them: names, patterns, groups, YAML files. sequence_length: tokens of context;
    None: the model's own. Returns the folder that was evaluated, or its name on the Hub; the results of each task,
    {task: {"metrics": {name: value}, ...}}; and lm-eval's table. Raises UserError if lm-eval is missing, or a task
    can't be loaded.
    """
    if find_spec("lm_eval") is None:
        raise UserError("--tasks: needs the package lm-eval; run `pip install lm-eval`.")
    if PartialState().num_processes > 1:
        raise UserError("--tasks: runs in one process; start it with python instead of a launcher.")
    import lm_eval
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    precision = evaluation_precision(mixed_precision)
    loaded, tokenizer = load_exported(model)
    tokenizer.model_max_length = 10**9  # it would warn of texts that lm-eval is about to cut into windows
    harness = HFLM(
        loaded,
        backend="causal",
        tokenizer=tokenizer,
        batch_size=batch_size or 8,
        max_length=evaluation_length(loaded, sequence_length),
        mixed_precision_dtype=_DTYPES[precision],
        softmax_dtype=torch.float32,
    )
    try:
        config = EvaluatorConfig(tasks=tasks)
        manager = config.process_tasks()
        found = lm_eval.simple_evaluate(harness, tasks=config.tasks, task_manager=manager, log_samples=False)
    except Exception as error:  # of lm-eval, datasets, a YAML file or a task's own code: depends on what is broken
        raise UserError(f"--tasks: {one_line(error)[:300]}.") from None
    assert found is not None  # only on other processes
    results = {
        task: {
            "metrics": {key: value for key, value in metrics.items() if _is_figure(key, value)},
            "version": found["versions"].get(task),
            "num_fewshot": found["n-shot"].get(task),
            "num_samples": found["n-samples"].get(task, {}).get("effective"),
            "lm_eval": version("lm-eval"),
            "mixed_precision": precision,
        }
        for task, metrics in found["results"].items()
    }
    return str(loaded.name_or_path), results, make_table(found)


def record(model: str, results: dict[str, dict[str, Any]]) -> list[Path]:
    """Record the results of a model that a run exported: in tasks.json of the run, and in the card of the model.

    Results of the same tasks are replaced. Returns the files that were written; none for a model from elsewhere.
    """
    folder, written = Path(model), []
    run = RunFolder(folder.resolve().parent)
    if run.config.is_file() and (folder / "config.json").is_file():
        weights = list_files(folder, sorted(folder.glob("*.safetensors")))
        new = {task: {"model": folder.name, **found, "weights": weights} for task, found in results.items()}
        write_text(run.tasks, json.dumps(read_json(run.tasks) | new, indent=1))
        written.append(run.tasks)
    metrics = {  # without standard errors, and without the name of lm-eval's filter if there is none
        task: {name.removesuffix(",none"): value for name, value in found["metrics"].items() if "_stderr" not in name}
        for task, found in results.items()
    }
    shots = {task: found["num_fewshot"] for task, found in results.items()}
    if add_task_results(folder / "README.md", metrics, shots, f"lm-eval {version('lm-eval')}"):
        written.append(folder / "README.md")
    return written


def _is_figure(key: str, value: Any) -> bool:
    """Return whether a result is a metric, whose key ends in the name of a filter, and has a finite value."""
    return "," in key and isinstance(value, int | float) and math.isfinite(value)  # otherwise it may be "N/A"
