"""The model card: what the model was trained on, how good it is, how to load it; and changes to a card that is there.

Owns the text and its metadata. Does not know how the figures were measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Template
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import DataSection, RunConfig, RunSection
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import position_limit
from hfgolf.run.provenance import package_version
from hfgolf.run.record import row_seconds
from hfgolf.system.durable import write_text
from hfgolf.system.redact import redact
from hfgolf.system.wording import count_of, describe_overlap, dollars, duration, join_words

_TEMPLATE = Path(__file__).with_name("model_card.md")
_USAGE = Path(__file__).with_name("usage.md")
_GOLF_SIZE = Path(__file__).with_name("golf_size.md")
CHAT_SECTION = "## How to chat with it"
_USAGE_IN_CARD = re.compile(
    r"^## How to load it\n.*?(?=\n+(## How good it is|A sample, generated|## How it was trained))",
    re.DOTALL | re.MULTILINE,
)
_RESULTS = {"val_loss": "loss (nats per token)", "val_bits_per_byte": "bits per byte", "val_perplexity": "perplexity"}


def model_card(
    config: RunConfig,
    summary: dict[str, Any],
    model: PreTrainedModel,
    pictures: Sequence[Path] = (),
    has_gguf: bool = False,
) -> str:
    """Return the card as Markdown with metadata.

    summary: the result of `train()`; missing figures are omitted. pictures: images of the training curves, referenced
    by file name; export_model copies them next to the card. has_gguf: it can be written as GGUF. Secrets are redacted,
    even in the sample, because a model may have learned them from its corpus.
    """
    title = (config.hub.repo_id or str(config.run.name)).split("/")[-1]
    figures = {metric: summary[metric] for metric in _RESULTS if math.isfinite(summary.get(metric, math.nan))}
    texts = list(config.data.sources().values())
    hub_datasets = [text.hub_name for text in texts if text.source == "hub" and text.hub_name]
    hub_dataset = hub_datasets[0] if len(texts) == len(hub_datasets) == 1 else None
    dataset = join_words(map(_dataset, texts), last=" and ")
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=hub_dataset or config.data.source,
            dataset_name=f"{dataset}, validation split",
            dataset_config=texts[0].hub_config if hub_dataset else None,
            metric_type=metric.removeprefix("val_"),
            metric_name=_RESULTS[metric],
            metric_value=round(value, 4),
        )
        for metric, value in figures.items()
    ]
    init_from, is_golf = summary.get("init_from") or {}, isinstance(model, GolfForCausalLM)
    public = config.replace(  # without the values that only concern this machine
        run__output_dir=RunSection().output_dir, run__price_per_hour=None, data__cache_dir=None, train__resume=None
    )
    data = ModelCardData(
        license=config.hub.license,
        language=list(config.hub.language) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hfgolf"],
        model_name=title,
        datasets=list(dict.fromkeys(hub_datasets)) or None,
        eval_results=results or None,
        base_model=init_from["name"] if init_from.get("revision") else None,
        base_model_relation="finetune" if init_from.get("revision") else None,
    )
    teachers = len(config.train.distill_from)
    taught = f", with {count_of(teachers, 'model')} of the same text as teachers," if teachers else ""
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=_plain(title),
        architecture="GPT" if hasattr(model.config, "golf") or is_golf else type(model).__name__,
        usage=usage(
            model, config.hub.repo_id or summary.get("model", title), config.data.messages_column is not None, has_gguf
        ),
        dataset=join_words(map(_trained_on, texts), last=" and "),
        origin=_origin(init_from) + taught,
        config=config,
        figures={_RESULTS[metric]: f"{value:,.4f}" for metric, value in figures.items()},
        summary=summary,
        overlap=describe_overlap(summary),
        effort=_effort(config, summary),
        pictures=[picture.name for picture in pictures],
        # a code fence that the sample cannot close
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", summary.get("sample", ""))), default=0)),
        version=package_version("hfgolf"),
        yaml=ResolvedConfig(public, {}).to_yaml().replace("  # default", "").strip(),
    )
    return redact(f"{card}\n")


def usage(model: PreTrainedModel, location: str, is_chat: bool, has_gguf: bool = False) -> str:
    """Return the sections on loading, chatting with and fine-tuning a model, and on running it elsewhere.

    is_chat: it was trained on conversations. has_gguf: it can be written as GGUF.
    """
    from hfgolf.publish.native import has_native  # late: it imports seven architectures

    config: Any = model.config
    linear = [name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    limit = position_limit(model)
    return Template(_USAGE.read_text(encoding="utf-8")).render(
        location=location,
        trust=", trust_remote_code=True" if isinstance(model, GolfForCausalLM) else "",
        is_limited=limit is not None,
        num_tokens=limit or getattr(config, "max_position_embeddings", None),
        targets=json.dumps([name for name in dict.fromkeys(linear) if name != "lm_head"]),
        has_native=has_native(model),
        has_gguf=has_gguf,
        chat_section=CHAT_SECTION if is_chat else None,
        made_from=getattr(config, "golf", None),
        num_parameters=f"{model.num_parameters():,}",
    )


def with_golf_size(card: str, ledger: Mapping[str, Any]) -> str:
    """Return a card with a section on the bytes of a golf export, in front of the one on the training."""
    sizes = {file["name"]: file["bytes"] for file in ledger["files"]}
    section = Template(_GOLF_SIZE.read_text(encoding="utf-8")).render(ledger, sizes=sizes)
    before, heading, training = card.partition("## How it was trained")
    return f"{before.rstrip()}\n\n{section}\n\n{heading}{training}".rstrip() + "\n"


def gguf_card(file: str, repo_id: str, base_model: str | None) -> str:
    """Return the card of a repository with a GGUF file. base_model: the repository of the model that it is of."""
    relation = None if base_model is None else "quantized"
    data = ModelCardData(
        pipeline_tag="text-generation", tags=["gguf", "hfgolf"], base_model=base_model, base_model_relation=relation
    )
    of = f" The model is [{base_model}](https://huggingface.co/{base_model})." if base_model else ""
    return (
        f"---\n{data}\n---\n\n# {_plain(Path(file).stem)}\n\nA file for llama.cpp, written by hfgolf.{of}\n\n"
        f'```sh\nhf download {repo_id} {file} --local-dir .\nllama-completion -m {file} -p "Once upon a time" -n 100\n'
        "```\n"
    )


def _dataset(data: DataSection) -> str:
    """Return the name of a text, without this machine's folders."""
    if data.source == "python_stdlib":
        return "the Python standard library"
    names = [name if "://" in name else Path(name).name for name in data.files]
    return str(data.hub_name) if data.source == "hub" else join_words(names)


def _trained_on(data: DataSection) -> str:
    """Return what the model was trained on as Markdown, with a link if it is on the Hub."""
    if data.source != "hub":
        return _plain(_dataset(data))
    name = str(data.hub_name)
    part = f"{data.hub_config}, {data.hub_split}" if data.hub_config else data.hub_split
    return f"[{_plain(name)}](https://huggingface.co/datasets/{quote(name)}) ({_plain(part)})"


def _effort(config: RunConfig, summary: dict[str, Any]) -> str:
    """Return how long the run took and what it cost, as the end of a sentence; "" if unknown."""
    seconds = sum(row_seconds(summary).values())
    if not seconds:
        return ""
    price = config.run.price_per_hour
    cost = "" if price is None else f", which cost {dollars(seconds / 3600 * price)} at {dollars(price)} per hour"
    return f" in {duration(seconds)}{cost}"


def _plain(name: str) -> str:
    """Escape a name for Markdown. A file may be called `x](http://evil)`, or contain a line break."""
    return re.sub(r"([\\`*\[\]<>|!&])", r"\\\1", " ".join(name.split()))


def _origin(init_from: dict[str, Any]) -> str:
    """Say what training started from: nothing, a model on the Hub, or weights known by their hash."""
    if not init_from:
        return "from scratch"
    if init_from["revision"]:
        return f"from the weights of [{init_from['name']}](https://huggingface.co/{init_from['name']})"
    return f"from the weights of {_plain(Path(init_from['name']).name)} (sha256 {init_from['sha256'][:16]})"


def with_usage(card: str, sections: str) -> str:
    """Return a card with other sections on loading and using the model; an edited card without them stays as it is."""
    return _USAGE_IN_CARD.sub(lambda _: sections, card, count=1)


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
