"""The schema of metrics.jsonl: the columns of a row and the kinds of events, with their units and meanings.

`python -m hfgolf.run.schema` prints this as docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict, get_type_hints

Nats = Annotated[float | None, "nats per token"]
Seconds = Annotated[float, "s"]


class EvaluationColumns(TypedDict, total=False):
    """Columns that only rows with an evaluation have; `_ema` columns only if weights are averaged."""

    val_tokens: Annotated[int, "tokens", "tokens predicted in the evaluation"]
    val_bytes: Annotated[int, "bytes", "UTF-8 bytes of the text of these tokens"]
    val_loss_ema: Annotated[Nats, "validation loss of the averaged weights"]
    val_bits_per_byte_ema: Annotated[float | None, "bits per byte", "the same per byte of the raw text"]


class OldTextColumns(TypedDict, total=False):
    """Columns of rows with an evaluation, with data.old_text: of the weights that an export would take."""

    old_val_loss: Annotated[Nats, "loss on data.old_text"]
    old_val_bits_per_byte: Annotated[float | None, "bits per byte", "the same per byte of the raw text"]


class SubsetColumns(TypedDict, total=False):
    """Columns of the last row, if train.eval_tokens is less than all: the evaluation that compares with earlier rows.

    The columns without `subset_` are then those of the evaluation on all tokens.
    """

    subset_val_loss: Annotated[Nats, "val_loss on train.eval_tokens tokens"]
    subset_val_bits_per_byte: Annotated[float | None, "bits per byte", "the same per byte of the raw text"]
    subset_val_tokens: Annotated[int, "tokens", "tokens predicted in that evaluation"]
    subset_val_bytes: Annotated[int, "bytes", "UTF-8 bytes of the text of these tokens"]
    subset_val_loss_ema: Annotated[Nats, "val_loss_ema on them"]
    subset_val_bits_per_byte_ema: Annotated[float | None, "bits per byte", "the same per byte of the raw text"]
    subset_old_val_loss: Annotated[Nats, "old_val_loss on train.eval_tokens tokens"]
    subset_old_val_bits_per_byte: Annotated[float | None, "bits per byte", "the same per byte of the raw text"]


class ForecastColumns(TypedDict, total=False):
    """Columns that only rows with a forecast have (golf.forecast_every_steps). The loss is predicted."""

    golf_bytes: Annotated[int, "bytes", "artifact and program, if rounding may cost 0.01 nats per token"]
    golf_margin_bytes: Annotated[int | None, "bytes", "golf.budget_bytes minus that; null without a budget"]
    golf_step: Annotated[float | None, "", "D of the steps that the budget allows; null without a budget"]
    golf_loss: Annotated[Nats, "what rounding is predicted to cost at the budget; null without a budget"]


class RoundingColumns(TypedDict, total=False):
    """Columns of runs that train with rounded weights (golf.qat_fraction)."""

    golf_rounded_matrices: Annotated[int, "", "matrices rounded in the last of these steps"]


class Row(EvaluationColumns, OldTextColumns, SubsetColumns, ForecastColumns, RoundingColumns):
    """One row per log interval (train.log_every_steps), about the steps since the previous row.

    With data.messages_column, losses and bits per byte are of the assistant's turns only.
    null means that a number is not finite, or not known on this machine.
    """

    step: Annotated[int, "steps", "optimizer steps so far, including skipped ones"]
    epoch: Annotated[float, "epochs", "passes over the training data so far; excluded blocks count as read"]
    tokens: Annotated[int, "tokens", "training tokens read so far"]
    train_loss: Annotated[Nats, "mean of the finite training losses of these steps, over all processes"]
    grad_norm: Annotated[float | None, "", "mean of the finite gradient norms of these steps, before clipping"]
    clipped_share: Annotated[float | None, "", "share of these norms above train.max_grad_norm; null without a limit"]
    tokens_per_second: Annotated[float, "tokens/s", "speed of these steps, over all processes, without compiling"]
    mfu: Annotated[float, "", "useful FLOP/s of these steps over the peak of all devices (Chowdhery et al. 2022)"]
    data_seconds: Annotated[Seconds, "time that these steps waited for batches"]
    compute_seconds: Annotated[Seconds, "the rest of the time of these steps"]
    memory_bytes: Annotated[int, "bytes", "peak so far: of this process on a CPU, of its tensors on a GPU"]
    process_memory_bytes: Annotated[int, "bytes", "current memory of this process, as `top` shows it"]
    gpu_memory_bytes: Annotated[int | None, "bytes", "memory in use on the GPU, by all processes"]
    gpu_utilization: Annotated[float | None, "", "fraction of NVML's last sample period in which the GPU was busy"]
    train_losses: Annotated[list[float | None], "nats per token", "training loss of each of these steps"]
    grad_norms: Annotated[list[float | None], "", "gradient norm of each of these steps, before clipping"]
    sample_hashes: Annotated[list[str], "", "hash of the blocks that each of these steps read, in any order"]
    val_loss: Annotated[Nats, "validation loss of the raw weights; null without an evaluation"]
    val_bits_per_byte: Annotated[float | None, "bits per byte", "the same per byte of the raw text"]
    learning_rate: Annotated[float, "", "learning rate of the first parameter group in the last of these steps"]
    skipped_steps: Annotated[int, "steps", "steps so far without an update, because the gradient was not finite"]
    elapsed_seconds: Annotated[Seconds, "training so far, without setup; train.max_minutes limits it"]
    seconds_setup: Annotated[Seconds, "from the start of the process to the first step, without compiling"]
    seconds_compile: Annotated[Seconds, "compiling so far"]
    seconds_data: Annotated[Seconds, "waiting for batches so far"]
    seconds_train: Annotated[Seconds, "the rest of the steps so far"]
    seconds_evaluate: Annotated[Seconds, "evaluations and samples so far"]
    seconds_checkpoint: Annotated[Seconds, "waiting for saves, and rollbacks, so far"]
    seconds_other: Annotated[Seconds, "logging so far and, after the last step, exporting and pushing"]
    logged_at: Annotated[float, "s", "Unix time at which the row was written"]


OPTIONAL: dict[Any, str] = {
    EvaluationColumns: "; only in rows with an evaluation",
    OldTextColumns: "; only in rows with an evaluation, with data.old_text",
    SubsetColumns: "; only in a last row on more tokens than the rows before",
    ForecastColumns: "; only in rows with a forecast",
    RoundingColumns: "; only with golf.qat_fraction",
}


class Event(TypedDict):
    """Something that happened during the run; further keys depend on the kind (see EVENTS)."""

    step: Annotated[int, "steps", "optimizer steps so far"]
    event: Annotated[str, "", "the kind"]
    elapsed_seconds: Annotated[Seconds, "training so far, without setup"]


EVENTS: dict[str, tuple[str, dict[str, str]]] = {
    "resumed": (
        "the run resumed from a checkpoint",
        {
            "changed": 'what changed since the checkpoint, as "key old -> new"',
            "begins_data": "true if it reads its data from the beginning, because the text or its order changed",
        },
    ),
    "init_from": (
        "the run began with the weights of model.init_from; their evaluation, before the first step, on all tokens",
        {
            "name": "model.init_from",
            "revision": "the commit on the Hub; null: a folder",
            "sha256": "of the names and fp32 values of the parameters",
            **dict.fromkeys(("val_loss", "val_bits_per_byte", "val_tokens", "val_bytes"), "as in a row"),
            **dict.fromkeys(("old_val_loss", "old_val_bits_per_byte"), "as in a row, with data.old_text"),
        },
    ),
    "sample": ("text sampled from the model", {"text": "the text, with secrets redacted"}),
    "sample_failed": ("sampling failed", {"reason": "why"}),
    "skipped_step": (
        "a step made no update, because its gradient was not finite",
        {
            "first_parameter": "the first parameter with a nonfinite gradient",
            "train_loss": "of that step, nats per token",
            "grad_norm": "of that step",
            "block_starts": "token offsets at which the blocks of that step begin, or their segments"
            " (`batch.segment_length`)",
        },
    ),
    "fp16_overflow": (
        "a step overflowed under fp16's loss scale and made no update",
        {"first_parameter": "as above", "loss_scale": "the scaler's new, lower scale"},
    ),
    "rollback": (
        "the run was rolled back to a checkpoint",
        {
            "cause": "nonfinite, spike or divergence",
            "from_step": "the step it had reached",
            "excluded_blocks": "all positions [start, end) in the data that no later step reads",
            "learning_rate_scale": "factor on all learning rates from now on",
        },
    ),
    "out_of_memory": (
        "memory ran out and the micro-batch was reduced",
        {"micro_batch_size": "[before, after], sequences", "reason": "message of the allocator"},
    ),
    "loop": (
        "the layers of a loop (model.overrides.loop) run several times from the next step on",
        {"active": "false: once"},
    ),
    "save_failed": ("a checkpoint could not be written", {"reason": "why"}),
    "finding": (
        "the doctor found a symptom",
        {
            "symptom": "its name",
            "saw": "the evidence",
            "causes": "likely causes, the most likely first",
            "fix": 'values to try, {"section.key": value}',
        },
    ),
    "damaged_cache": ("the token cache was damaged during the run, which ended", {"reason": "which file, and how"}),
    "stopped": ("a signal ended the run after a save", {"signal": "its name"}),
}
"""{kind: (what happened, {key: what it holds})}"""


def on_subset(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its evaluation on the tokens of the rows before, if it is a last one on all (SubsetColumns)."""
    subset = {key.removeprefix("subset_"): value for key, value in row.items() if key.startswith("subset_")}
    return {**row, **subset}


def markdown() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# metrics.jsonl",
        "",
        "Generated by `python -m hfgolf.run.schema > docs/metrics.md`.",
        "",
        "Each line is a JSON object: a row, or an event if it has the key `event`.",
        "",
        "## Rows",
        "",
        *str(Row.__doc__).replace("\n    ", "\n").strip().splitlines(),
        "",
        "| column | unit | meaning |",
        "|---|---|---|",
    ]
    hints = get_type_hints(Row, include_extras=True)
    for name in sorted(hints, key=lambda name: name in Row.__optional_keys__):
        unit, meaning = hints[name].__metadata__
        often = next((text for columns, text in OPTIONAL.items() if name in columns.__optional_keys__), "")
        lines.append(f"| `{name}` | {unit} | {meaning}{often} |")
    lines += ["", "## Events", "", "Each has `step`, `event` (its kind) and `elapsed_seconds`.", ""]
    lines += ["| kind | what happened | further keys |", "|---|---|---|"]
    for kind, (meaning, keys) in EVENTS.items():
        further = "; ".join(f"`{key}`: {text}" for key, text in keys.items())
        lines.append(f"| `{kind}` | {meaning} | {further} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
