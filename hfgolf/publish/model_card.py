"""The model card: what the model was trained on, how good it is and how to load it.

Owns the text and its metadata. Does not know how the figures were measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hfgolf.command_line import ResolvedConfig
from hfgolf.config import RunConfig, RunSection, join_words
from hfgolf.durable import write_text
from hfgolf.redact import redact

_TEMPLATE = Path(__file__).with_name("model_card.md")
_RESULTS = {"val_loss": "loss (nats a token)", "val_bits_per_byte": "bits per byte", "val_perplexity": "perplexity"}


def model_card(config: RunConfig, summary: dict[str, Any], pictures: Sequence[Path] = ()) -> str:
    """Return the card as Markdown with metadata. summary: as `train()` returns it; missing figures are left out.

    pictures: of the training's curves, shown by their names; export_model lays them beside the card. Secrets are
    redacted, those in a sample included: a model may have learnt them from its corpus.
    """
    title = (config.hub.repo_id or str(config.run.name)).split("/")[-1]
    figures = {metric: summary[metric] for metric in _RESULTS if math.isfinite(summary.get(metric, math.nan))}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=config.data.hub_name or config.data.source,
            dataset_name=f"{_dataset(config)}, validation part",
            metric_type=metric.removeprefix("val_"),
            metric_name=_RESULTS[metric],
            metric_value=round(value, 4),
        )
        for metric, value in figures.items()
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hfgolf"],
        model_name=title,
        datasets=[config.data.hub_name] if config.data.hub_name else None,
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=_plain(title),
        location=config.hub.repo_id or summary.get("model", title),
        dataset=_plain(_dataset(config)),
        config=config,
        figures={_RESULTS[metric]: f"{value:,.4f}" for metric, value in figures.items()},
        summary=summary,
        pictures=[picture.name for picture in pictures],
        fence=_fence(summary.get("sample", "")),
        version=version("hfgolf"),
        yaml=_public_yaml(config),
    )
    return redact(f"{card}\n")


def name_in_card(path: Path, location: str) -> None:
    """Make the card at `path` say that the model loads from `location`."""
    card = path.read_text(encoding="utf-8")
    # the first two are the example's; a sample from a model that was trained on Python may hold more
    named = re.sub(r'(?<=\.from_pretrained\(")[^"]*', lambda _: location, card, count=2)
    if named != card:
        write_text(path, named)


def _dataset(config: RunConfig) -> str:
    """Name the corpus without the folders of this machine."""
    if config.data.source == "python_stdlib":
        return "the Python standard library"
    names = [name if "://" in name else Path(name).name for name in config.data.files]
    return config.data.hub_name or join_words(names)


def _plain(name: str) -> str:
    """Return Markdown that shows a name as it is: a file may be called `x](http://evil)`, or hold a line break."""
    return re.sub(r"([\\`*\[\]<>|!&])", r"\\\1", " ".join(name.split()))


def _public_yaml(config: RunConfig) -> str:
    """Return the config without what concerns only the machine it ran on."""
    public = config.replace(
        run__output_dir=RunSection.output_dir, run__price_per_hour=None, data__cache_dir=None, train__resume=None
    )
    return ResolvedConfig(public, {}).to_yaml().replace("  # default", "").strip()


def _fence(text: str) -> str:
    """Return a Markdown fence that the text cannot close."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
