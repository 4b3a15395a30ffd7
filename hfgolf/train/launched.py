"""What `accelerate launch` was told, from the environment and command line that it gives to each process.

Each setting is honored, harmless, or refused in one line. What this table does not know is refused, so that no setting
is ignored in silence. Does not act on any setting.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping

import torch

from hfgolf.system.errors import UserError
from hfgolf.system.signals import launcher_options

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
PARTS = (
    *("ACCELERATE_DYNAMO_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_SAGEMAKER_"),
    *("ACCELERATE_ALLOW_CP_STANDALONE", "ACCELERATE_FP8_"),
)
"""What the names of settings begin with that are parts of what is refused, or off, as a whole."""


def is_known(name: str) -> bool:
    """Return whether hfgolf knows what a variable of accelerate's means."""
    return name in REFUSED or name in HONORED or name in HARMLESS or name.startswith(PARTS)


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
        if not is_known(name):
            raise UserError(f"accelerate: {name}={value}: hfgolf does not know this setting; unset it.")
    if has_fsdp and environment.get("FSDP_VERSION", "1") != "2":
        raise UserError(f"accelerate: FSDP version 1, its default, flattens the matrices that Muon needs; {_SHARD}.")
    if has_fsdp and torch.__version__ < FSDP2_TORCH:  # by version, not as strings: it is a TorchVersion
        raise UserError(
            f"accelerate: FSDP2 needs torch {FSDP2_TORCH} or newer, this is {torch.__version__}; start without it for a"
            " full copy on each GPU."
        )
    return has_fsdp


def processes_asked_of_accelerate() -> int | None:
    """Return how many processes `accelerate launch` was told to start, None if it did not start this one.

    On a CPU it starts one, whatever it was told.
    """
    arguments = launch_arguments()
    if arguments is None:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if arguments.num_processes is not None or not (arguments.config_file or os.path.isfile(default_config_file)):
        return arguments.num_processes
    return int(load_config_from_file(arguments.config_file).num_processes)


def launch_arguments() -> argparse.Namespace | None:
    """Return the arguments of the `accelerate launch` that started this process, None if none did."""
    options = launcher_options()
    return None if options is None else _parsed(tuple(options))


@functools.cache  # a start asks six times, and each time accelerate would build its parser
def _parsed(options: tuple[str, ...]) -> argparse.Namespace:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args(options)


def precision_of_accelerate() -> str | None:
    """Return the precision that the user chose for `accelerate launch`, None if they chose none.

    Without `accelerate config` and without a flag, launch still exports ACCELERATE_MIXED_PRECISION=no. The launcher's
    command line and the default config file tell whether that "no" was chosen.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision != "no":
        return precision
    from accelerate.commands.config.config_args import default_config_file

    arguments = launch_arguments()
    is_stated = arguments is not None and (arguments.mixed_precision or arguments.config_file)
    return precision if is_stated or os.path.isfile(default_config_file) else None
