"""What other trainers call a key, and what hfgolf called it before. No key has two names.

Names of nanoGPT and transformers are only answered. Those of earlier hfgolf moved to model.overrides, or are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfgolf.config.sections import KEY_TYPES, Positive, has_type, plain

_ANSWERS: dict[str, str] = {
    "lr": "optim.learning_rate (of Muon's matrices) and optim.adamw_learning_rate (of all else, or of AdamW)",
    "min_lr": "schedule.floor, a fraction of the learning rate and not a rate",
    "max_iters": "train.max_steps; or train.max_minutes",
    "lr_decay_iters lr_decay_steps": "the schedule ends with the run: train.max_steps, and schedule.warmdown_fraction",
    "decay_lr": "schedule.name: constant or another",
    "lr_scheduler_type": "schedule.name",
    "warmup_iters": "schedule.warmup_steps, in steps",
    "warmup_ratio": "schedule.warmup_steps, in steps and not a fraction",
    "n_embd d_model": "model.hidden_size",
    "n_head": "model.num_attention_heads",
    "n_layer": "model.num_hidden_layers",
    "n_kv_head": "model.num_key_value_heads",
    "n_inner": "model.intermediate_size",
    "n_positions n_ctx block_size max_seq_length max_length": (
        "batch.sequence_length, in tokens; model.max_position_embeddings if the model is for longer ones"
    ),
    "bias": "model.use_bias",
    "attn_pdrop": "model.attention_dropout",
    "resid_pdrop embd_pdrop": "model.dropout",
    "batch_size": "batch.tokens_per_step, in tokens of all processes; batch.micro_batch_size, in sequences of one",
    "device_batch_size": "batch.micro_batch_size, in sequences; auto chooses it",
    "per_device_train_batch_size": (
        "batch.micro_batch_size, in sequences; auto chooses it. The whole batch is batch.tokens_per_step"
    ),
    "per_device_eval_batch_size": "evaluations take batch.micro_batch_size",
    "gradient_accumulation_steps": (
        "it follows from batch.tokens_per_step, batch.micro_batch_size and the number of processes"
    ),
    "num_train_epochs epochs": "train.max_epochs",
    "weight_decay": "optim.weight_decay (of matrices); schedule.weight_decay is how it changes over the run",
    "wd": "optim.weight_decay",
    "beta1": "optim.betas, a list of two; optim.momentum is Muon's",
    "beta2 adam_beta1 adam_beta2": "optim.betas, a list of two",
    "adam_epsilon": "optim.eps",
    "grad_clip": "train.max_grad_norm",
    "optim optimizer": "optim.name",
    "bf16 fp16 dtype": "train.mixed_precision: no, bf16 or fp16; by default what the hardware is fast at",
    "tf32": "hfgolf sets it by itself; train.mixed_precision chooses the precision of autocast",
    "torch_compile": "train.compile",
    "seed": "run.seed",
    "data_seed": "run.seed, which is also that of the order of the data",
    "out_dir output_dir": "run.output_dir, which holds the folders of runs, and run.name",
    "run_name": "run.name, also in trackers",
    "logging_steps log_interval": "train.log_every_steps",
    "eval_steps eval_interval eval_strategy": "train.eval_every_steps",
    "eval_iters": "train.eval_tokens, in tokens",
    "save_steps save_strategy": "train.save_every_steps; or train.save_every_minutes",
    "save_total_limit": "train.keep_last",
    "resume_from_checkpoint": "train.resume: auto, latest or the path of a checkpoint",
    "early_stopping_patience": "train.patience_evals",
    "report_to wandb wandb_log": "track.trackers, a list such as [wandb]",
    "wandb_project": "track.project",
    "wandb_run_name": "run.name",
    "dataset": "data.files for text of yours, data.hub_name for a dataset of the Hub, as user/name",
    "dataset_name": "data.hub_name, with data.source hub",
    "datasets interleave_probs mix_strategy data_stages dataset_weights": "data.mixture, texts with weights",
    "train_file": "data.files, a list",
    "validation_file": "data.val_files, a list",
    "dataloader_num_workers": "data.num_workers",
    "push_to_hub": "hub.push, with hub.repo_id",
    "hub_model_id": "hub.repo_id",
    "hub_private_repo": "hub.private",
    "model_name_or_path": "model.init_from to start from weights; model.architecture for another architecture",
    "device": "accelerate chooses it; `accelerate config` or CUDA_VISIBLE_DEVICES",
}
OTHER_NAMES = {name: answer for names, answer in _ANSWERS.items() for name in names.split()}
"""{name elsewhere: the key here, and how it differs}."""

MOVED_TO_OVERRIDES: dict[str, Any] = {
    **dict.fromkeys(("logit_soft_cap", "logit_soft_cap_negative", "query_gain", "unet_skips", "tied_embedding_std")),
    **dict.fromkeys(("rope_dims", "parallel_from", "loop", "head_gate", "smear_gate", "bigram_buckets")),
    **dict.fromkeys(("branch_scale", "embedding_residual", "norm_depth_scale", "lanes"), False),
    **{"rope_theta": 10_000.0, "activation_slope": 0.5, "norm_eps": 1e-6, "norm_weight": True},
    **{"head_gate_scale": 1.0, "head_gate_peak": 1.0, "attention_span": "stream", "exclude_self_value": 0},
    **{"bigram_size": 112, "value_embedding_layers": 0, "value_embedding_size": 128, "embedding_size": None},
    **{"matrix_init": "normal", "soft_cap_form": "tanh"},
}
"""{field of golf that was a key of the section model: its default, which files of earlier versions list}."""

HALF_LIFE = "optim.ema_half_life_tokens"
GONE: dict[str, tuple[Any, str]] = {
    HALF_LIFE: (None, "set optim.ema_decay to 0.5 ** (batch.tokens_per_step / the half-life)"),
    "optim.nesterov": (True, "leave it out: the momentum of Muon and SGD is Nesterov's"),
    "optim.momentum_end": (None, "leave it out: momentum stays at optim.momentum"),
    "optim.split_qkv": (True, "leave it out: Muon takes queries, keys and values apart"),
    "data.prefetch_factor": (None, "leave it out: each worker prefetches two batches"),
    "golf.column_steps": (False, "leave it out: only rows have steps"),
    "golf.damping": (0.01, "leave it out: it is 0.01"),
    "schedule.warmdown_shape": ("linear", "leave it out: the warmdown is linear"),
    "track.run_name": (None, "set run.name, which trackers take"),
    "train.min_improvement": (0.0, "leave it out: any lower validation loss is an improvement"),
    "train.rollback_learning_rate_factor": (0.5, "leave it out: a rollback halves the learning rates"),
}
"""{key that is gone: (its default, what to do if another value was set)}."""


def is_earlier(key: str) -> bool:
    """Return whether "section.key" was a key of an earlier version and is none now."""
    return key in GONE or (key.startswith("model.") and key.removeprefix("model.") in MOVED_TO_OVERRIDES)


def laid_over(below: Mapping[str, Any], layer: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], dict[str, Any]]:
    """Return {"section.key": value} of a layer over those below, by the keys of this version; the keys it sets; and
    {earlier key: value} of those that moved.

    What moved, and "model.overrides.NAME", become fields of the mapping model.overrides. A key of an earlier version
    that has its default sets nothing, unless its field is set below. One that is gone stays if it has another value.
    """
    values, said, moved = dict(below), set[str](), dict[str, Any]()
    layer = {key: _read(key, value) for key, value in layer.items()}
    if "optim.ema_decay" in layer:
        values.pop(HALF_LIFE, None)
    # a file of an earlier version states all defaults; its own overrides win over them
    only_below = _overrides(below).keys() - _overrides(layer).keys()
    for key, value in sorted(layer.items(), key=lambda item: item[0] != "model.overrides"):
        name = key.removeprefix("model.").removeprefix("overrides.")
        if key in GONE and _is(value, GONE[key][0]):
            values.pop(key, None)
        elif key in GONE or not (is_earlier(key) or key.startswith("model.overrides.")):
            values[key] = value
            said.add("optim.ema_decay" if key == HALF_LIFE else key)
        elif not is_earlier(key) or name in only_below or not _is(value, MOVED_TO_OVERRIDES[name]):
            moved |= {key: value} if is_earlier(key) else {}
            if isinstance(fields := values.get("model.overrides", {}), dict):  # else the config refuses it
                values["model.overrides"] = {**fields, name: value}
                said.add("model.overrides")
    return values, said, moved


def _read(key: str, value: Any) -> Any:
    """Return a value as the type of its key reads it, which of a field of the model is that of its default."""
    if key == "model.overrides" and isinstance(value, Mapping):
        return {name: _read(f"{key}.{name}", inner) for name, inner in value.items()}
    name = key.removeprefix("model.").removeprefix("overrides.")
    if key in KEY_TYPES:
        return plain(value, KEY_TYPES[key])
    default = GONE[key][0] if key in GONE else MOVED_TO_OVERRIDES.get(name, "")
    return plain(value, type(default) | float | list[float] | None)  # what is null by default may be a number or a list


def _overrides(values: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = values.get("model.overrides")
    return fields if isinstance(fields, dict) else {}


def _is(value: Any, default: Any) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def with_ema_decay(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with optim.ema_decay in place of the half-life that earlier versions took as well.

    A half-life that can't be one stays. Of a batch.tokens_per_step that can't be one, the config says so.
    """
    half_life, tokens_per_step = values.get(HALF_LIFE), values.get("batch.tokens_per_step", 4096)
    if not has_type(half_life, Positive):
        return values
    others = {key: value for key, value in values.items() if key != HALF_LIFE}
    if not has_type(tokens_per_step, KEY_TYPES["batch.tokens_per_step"]):
        return others
    return others | {"optim.ema_decay": float(0.5 ** (tokens_per_step / half_life))}


def in_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole config of an earlier version, {"section.key": value}, by the keys of this one."""
    return with_ema_decay(laid_over({}, values)[0])
