"""What `accelerate launch` asks of the processes that it starts: honored, harmless, or refused in one line.

Each of accelerate's settings reaches a process as a variable of the environment. What this table does not know is
refused, so that no setting is ignored in silence. Does not act on any setting.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfgolf.system.errors import UserError

# accelerate shards the embedding, the last norm and the head as one unit. The loss takes the head's weight and does not
# call the head; before 2.13, FSDP2 then takes the unit's pass for unfinished and never shards it again
FSDP2_TORCH = "2.13"
_OFF = ("", "0", "false", "no", "none", "off", "n", "f")
_SHARD = "start with `accelerate launch --use_fsdp --fsdp_version 2`, or with neither for a full copy on each GPU"

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "ACCELERATE_USE_DEEPSPEED": (_OFF, f"hfgolf does not train with DeepSpeed; {_SHARD}"),
    "ACCELERATE_USE_MEGATRON_LM": (_OFF, f"hfgolf does not train with Megatron-LM; {_SHARD}"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        _OFF,
        f"hfgolf splits only data over processes, no tensors, contexts or sequences; {_SHARD}",
    ),
    "ACCELERATE_USE_SAGEMAKER": (_OFF, "hfgolf does not use SageMaker's launcher; start with torchrun there"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        (*_OFF, "1", "auto"),
        "hfgolf accumulates batch.tokens_per_step; leave it out, and set that and batch.micro_batch_size",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": ((*_OFF, "auto"), "leave it out, and set train.max_grad_norm"),
    "ACCELERATE_DYNAMO_BACKEND": (_OFF, "hfgolf compiles by itself; leave it out, and set train.compile"),
    "ACCELERATE_USE_IPEX": (_OFF, "hfgolf does not use Intel's extension; leave it out"),  # until accelerate 1.13
    "ACCELERATE_DOWNCAST_BF16": (_OFF, "hfgolf keeps fp32 weights; leave it out, and set train.mixed_precision bf16"),
    "FSDP_OFFLOAD_PARAMS": (_OFF, "hfgolf's optimizer needs the shards on the GPU; leave it out"),
    "FSDP_ACTIVATION_CHECKPOINTING": (_OFF, "leave it out, and set model.gradient_checkpointing"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (_OFF, "leave it out, and set model.gradient_checkpointing"),
    "FSDP_IGNORED_MODULES": (_OFF, "hfgolf shards all weights; leave it out"),
}
"""{variable: (values without effect, why it is refused and what to do instead)}."""
HONORED = frozenset(
    {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_TORCH_DEVICE"}
    | {"ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD"}
    | {"FSDP_AUTO_WRAP_POLICY", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_MIN_NUM_PARAMS", "FSDP_STATE_DICT_TYPE"}
    | {"FSDP_CPU_RAM_EFFICIENT_LOADING"}
)
HARMLESS = frozenset(
    # of FSDP1 only; FSDP2 has no such choices
    {"FSDP_SHARDING_STRATEGY", "FSDP_BACKWARD_PREFETCH", "FSDP_FORWARD_PREFETCH", "FSDP_USE_ORIG_PARAMS"}
    | {"FSDP_SYNC_MODULE_STATES"}
    # of accelerate's own messages, tests and inference
    | {"ACCELERATE_LOG_LEVEL", "ACCELERATE_ENABLE_RICH", "ACCELERATE_DISABLE_RICH", "ACCELERATE_DEBUG_RDV_FILE"}
    | {"ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_INIT_INCLUDE_BUFFERS", "ACCELERATE_NUM_PROCESSES"}
    | {"ACCELERATE_USE_MPS_DEVICE", "ACCELERATE_USE_XPU", "ACCELERATE_IN_TPU_POD"}
)
_PARTS = {  # settings of what is refused or off as a whole
    "ACCELERATE_DYNAMO_": "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_DEEPSPEED_": "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_CONFIG_DS_FIELDS": "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_SAGEMAKER_": "ACCELERATE_USE_SAGEMAKER",
    "ACCELERATE_ALLOW_CP_STANDALONE": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_FP8_": "ACCELERATE_MIXED_PRECISION",  # fp8 is refused there
}


def kind(name: str) -> str | None:
    """Return whether a variable is "refused", "honored", "harmless" or a "part" of another; None if it is unknown."""
    for what, names in (("refused", REFUSED), ("honored", HONORED), ("harmless", HARMLESS)):
        if name in names:
            return what
    return "part" if name.startswith(tuple(_PARTS)) else None


def check_settings(environment: Mapping[str, str]) -> bool:
    """Return whether accelerate was told to shard the model over the processes, by FSDP2.

    Raises UserError for a setting that hfgolf neither honors nor may ignore, before any work.
    """
    has_fsdp = environment.get("ACCELERATE_USE_FSDP", "").lower() not in _OFF
    names = [name for name in environment if name.startswith("ACCELERATE_") or (has_fsdp and name.startswith("FSDP_"))]
    for name in sorted(names):
        value = environment[name]
        if name in REFUSED and value.lower() not in REFUSED[name][0]:
            raise UserError(
                f"accelerate: {name}={value} (its config, command line or environment): {REFUSED[name][1]}."
            )
        if kind(name) is None:
            raise UserError(f"accelerate: {name}={value}: hfgolf does not know this setting; unset it.")
    if has_fsdp and environment.get("FSDP_VERSION", "1") != "2":
        raise UserError(f"accelerate: FSDP version 1, its default, flattens the matrices that Muon needs; {_SHARD}.")
    if has_fsdp and torch.__version__ < FSDP2_TORCH:  # by version, not as strings: it is a TorchVersion
        raise UserError(
            f"accelerate: FSDP2 needs torch {FSDP2_TORCH} or newer, this is {torch.__version__}; start without it for a"
            " full copy on each GPU."
        )
    return has_fsdp
