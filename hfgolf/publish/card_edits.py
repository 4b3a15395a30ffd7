"""Changes to a card that is there: how to load the model, where it is, and what tasks say of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from hfgolf.system.durable import write_text

_USAGE_IN_CARD = re.compile(
    r"^## How to load it\n.*?(?=\n+(## How good it is|A sample, generated|## How it was trained))",
    re.DOTALL | re.MULTILINE,
)


def read_card(folder: Path) -> str:
    """Return the card in a model's folder; a title if there is none."""
    readme = folder / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else f"# {folder.name}"


def with_usage(card: str, sections: str) -> str:
    """Return a card with other sections on loading and using the model; an edited card without them stays as it is."""
    return _USAGE_IN_CARD.sub(lambda _: sections, card, count=1)


def set_location(path: Path, location: str) -> None:
    """Set the location in the examples of the card at `path`."""
    card = path.read_text(encoding="utf-8")
    # only the first ones: a sample from a model trained on Python may contain more
    named = re.sub(r'(?<=\.from_pretrained\(")[^"]*', lambda _: location, card, count=2)
    named = re.sub(r'(?<=export --model ")[^"]*(?=" --to gguf)', lambda _: location, named, count=1)
    if named != card:
        write_text(path, named)


def add_task_results(
    path: Path, metrics: dict[str, dict[str, float]], shots: dict[str, int | None], source: str
) -> bool:
    """Set the results of tasks in the metadata of the card at `path`; return whether it is a card of hfgolf's.

    metrics: {task: {metric: value}}. shots: examples in each prompt. source: what measured them, with its version.
    """
    if not path.is_file():  # ModelCard would look for it on the Hub
        return False
    try:
        card = ModelCard.load(path)
    except (OSError, ValueError):  # somebody broke its metadata
        return False
    data: Any = card.data
    if "hfgolf" not in (data.tags or []):
        return False
    kept = [result for result in data.eval_results or [] if not (result.source_name and result.dataset_type in metrics)]
    data.model_name = data.model_name or path.parent.name
    data.eval_results = kept + [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=task,
            dataset_args=None if shots[task] is None else {"num_few_shot": shots[task]},
            metric_type=metric.partition(",")[0],
            metric_name=metric,
            metric_value=round(value, 4),
            source_name=source,
            source_url="https://github.com/EleutherAI/lm-evaluation-harness",
        )
        for task, found in metrics.items()
        for metric, value in found.items()
    ]
    write_text(path, str(card))
    return True
