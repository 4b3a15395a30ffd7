"""The model card: what the model was trained on, how good it is and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import hfgolf
from hfgolf.command_line import ResolvedConfig
from hfgolf.config import RunConfig

_TEMPLATE = Path(__file__).with_name("model_card.md")
_RESULTS = {"val_loss": "loss (nats a token)", "val_bits_per_byte": "bits per byte", "val_perplexity": "perplexity"}


def model_card(config: RunConfig, summary: dict[str, Any]) -> str:
    """Return the card as Markdown with metadata. summary: as `train()` returns it; missing figures are left out."""
    corpus = {"python_stdlib": "the Python standard library", "files": ", ".join(config.data.files)}
    dataset = corpus.get(config.data.source, config.data.hub_name)
    name = config.hub.repo_id or str(config.run.name)
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=config.data.source,
            dataset_name=f"{dataset}, validation part",
            metric_type=metric.removeprefix("val_"),
            metric_name=label,
            metric_value=round(summary[metric], 4),
        )
        for metric, label in _RESULTS.items()
        if metric in summary
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hfgolf"],
        model_name=name.split("/")[-1],
        datasets=[config.data.hub_name] if config.data.hub_name else None,
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=name,
        dataset=dataset,
        config=config,
        figures={label: f"{summary[metric]:.4f}" for metric, label in _RESULTS.items() if metric in summary},
        summary=summary,
        version=hfgolf.__version__,
        yaml=ResolvedConfig(config, {}).to_yaml().replace("  # default", ""),
    )
    return str(card)
