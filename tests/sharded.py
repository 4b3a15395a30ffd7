"""FSDP2 on CPU processes: accelerate shards only on GPUs, so a test has to tell it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState

from hfgolf.optim.shards import is_sharded
from hfgolf.train import loop
from hfgolf.train.launched import FSDP2_TORCH

needs_fsdp2 = pytest.mark.skipif(torch.__version__ < FSDP2_TORCH, reason=f"FSDP2 needs torch {FSDP2_TORCH}")
LAUNCHED = {  # by `accelerate launch --config_file configs/accelerate/fsdp2.yaml`
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}

TRAIN = f"""import runpy, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sharded import shard
shard()
sys.argv[0] = {str(Path(__file__).parents[1] / "scripts" / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""scripts/train.py with FSDP2, as a program."""


def shard() -> None:
    """Let this process train with FSDP2, as one that accelerate starts on a GPU does."""
    os.environ |= LAUNCHED
    real = AcceleratorState.__init__

    def sharding(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
        if plugin is not None:
            if kwargs.get("fsdp_plugin") is not None and self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin, self.distributed_type = plugin, DistributedType.FSDP

    AcceleratorState.__init__ = sharding
    real_set_up = loop.set_up

    def set_up(*arguments: Any) -> Any:
        run = real_set_up(*arguments)
        assert all(is_sharded(param) for param in run.raw_model.parameters())
        return run

    loop.set_up = set_up
