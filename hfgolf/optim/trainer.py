"""Muon for transformers' Trainer.

Owns what Trainer's arguments mean for the groups of this optimizer, and which ways to train in parallel it knows.
groups.py decides which rule a parameter follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState

from hfgolf.config.sections import OptimSection
from hfgolf.optim.groups import build_optimizer
from hfgolf.optim.muon import Muon
from hfgolf.optim.shards import is_sharded
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

_OF_HFGOLFS_LOOP = {"name", "momentum_start", "momentum_warmup_steps", "ema_decay", "ema_export"}


def muon_for_trainer(
    args: TrainingArguments, **settings: Any
) -> tuple[Callable[[], Callable[..., Muon]], dict[str, Any]]:
    """Return Muon as `Trainer(model, args, optimizer_cls_and_kwargs=muon_for_trainer(args))` takes it.

    Muon updates the hidden matrices; embeddings, the head, norms, biases and convolutions follow AdamW. Every parameter
    takes args.learning_rate. AdamW's is a start, because Muon's updates get the size of AdamW's (update_scale
    match_rms_adamw); Muon bears several times as much. args.weight_decay decays matrices, embeddings and the head, as
    under Trainer's AdamW. AdamW takes args.adam_beta1, adam_beta2 and adam_epsilon. Muon's momentum is constant.

    settings: keys of the config's section optim that replace these, such as adamw_learning_rate=1e-3 or momentum=0.9.

    Raises UserError for a setting that is not allowed; and when Trainer builds the optimizer, for a model that is not
    one of transformers, and for DeepSpeed, FSDP1 and whatever else is not one process, DDP or FSDP2.
    """
    if unknown := _OF_HFGOLFS_LOOP & settings.keys():
        raise UserError(
            f"muon_for_trainer: {join_words(sorted(unknown))} works only in hfgolf's own loop; leave it out."
        )
    _optim_section(args, settings)  # a mistake ends here, not after the model has loaded
    # Trainer calls what is no optimizer class, and then what that returns: with its model and these values
    return (lambda: _build), {"args": args, "settings": settings}


def _optim_section(args: TrainingArguments, settings: dict[str, Any]) -> OptimSection:
    of_arguments: dict[str, Any] = {
        **dict.fromkeys(("learning_rate", "adamw_learning_rate"), args.learning_rate),
        **dict.fromkeys(("weight_decay", "embedding_weight_decay", "head_weight_decay"), args.weight_decay),
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "update_scale": "match_rms_adamw",
    }
    return OptimSection(**of_arguments | settings)


def _build(model: PreTrainedModel, args: TrainingArguments, settings: dict[str, Any]) -> Muon:
    """Build the optimizer when Trainer asks for it; a search over hyperparameters changes args before each trial."""
    state = AcceleratorState()
    kind = state.distributed_type
    is_known = kind == DistributedType.NO or kind.startswith("MULTI_") or state.is_fsdp2
    if not is_known or any(is_sharded(parameter) for parameter in model.parameters()):
        how = "a model that was sharded before" if is_known else "FSDP1" if kind == DistributedType.FSDP else kind.value
        raise UserError(f"muon_for_trainer: no Muon with {how}; train in one process, or several with DDP or FSDP2.")
    optimizer = build_optimizer(model, _optim_section(args, settings))
    optimizer.defaults["lr"] = args.learning_rate  # schedules with a floor (min_lr, lr_end) divide it by this
    return optimizer
