"""Training and scoring on a device that refuses fp64, as MPS does: fake tensors, no Apple computer.

The test runs this file as a program of its own, because registering a device cannot be undone in a process. It prints
one JSON object: for each part of a step, the devices of its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import reason_to_skip, register_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "")
def test_training_and_scoring_make_no_fp64_on_a_device_without_it():
    """The model, its loss with gradients, clipping, schedule, Muon and AdamW, averages, evaluation, windows."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True, env=environment)
    places = json.loads(done.stdout)
    assert places.pop("fp64_is_refused"), "else nothing would have been refused"
    on_device, on_host = ("loss", "norm", "state"), ("evaluation", "windows", "sum")
    assert places == dict.fromkeys(on_device, "mps") | dict.fromkeys(on_host, "cpu")


class RefuseFp64(TorchDispatchMode):
    """Raise TypeError for an operation that makes an fp64 tensor on MPS."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "mps" and leaf.dtype == torch.float64:
                raise TypeError(f"{operation}: Cannot convert a MPS Tensor to float64 dtype")
        return result


def train_and_score() -> dict[str, str]:
    """Run each part of training and scoring once. Return where its result is."""
    from hfgolf.config.sections import OptimSection, ScheduleSection
    from hfgolf.evaluate.loss import summed_nats
    from hfgolf.evaluate.windows import as_fp64, sum_nats, zero_nats
    from hfgolf.model.configuration_golf import GolfConfig
    from hfgolf.model.modeling_golf import GolfForCausalLM
    from hfgolf.optim.ema import Ema
    from hfgolf.optim.groups import build_optimizer
    from hfgolf.optim.schedule import apply_schedule
    from hfgolf.train.loop import gradient_norm

    config = GolfConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    config._attn_implementation = "eager"  # SDPA would look for a kernel of a build for Apple
    places: dict[str, str] = {}
    with FakeTensorMode(), torch.device("mps"), RefuseFp64():
        model = GolfForCausalLM(config).train()
        optimizer = build_optimizer(model, OptimSection())
        ema = Ema(model.named_parameters(), 0.99)
        ids = torch.zeros(4, 32, dtype=torch.long)
        loss = model(ids, shift_labels=ids).loss  # with its gradients; a backward pass cannot run on fake tensors
        places["loss"] = loss.device.type
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        norm = gradient_norm(model.parameters())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        places["norm"] = norm.device.type
        optimizer.create_state()
        apply_schedule(optimizer, 1, 10, OptimSection(), ScheduleSection())
        optimizer.step()
        (places["state"],) = {value.device.type for state in optimizer.state.values() for value in state.values()}
        ema.update(1)
        with torch.no_grad():
            nats = zero_nats(ids.device)
            nats += summed_nats(model, ids, ids).to(nats.device)
            places["evaluation"] = nats.device.type
            places["windows"] = sum_nats(model(ids).logits, ids).device.type
            places["sum"] = as_fp64(torch.ones(3)).device.type
    return places


def fp64_is_refused() -> bool:
    """Return whether fp64 raises, without which the above would prove nothing."""
    with FakeTensorMode(), RefuseFp64():
        try:
            torch.ones(3, device="mps").double()
        except TypeError:
            return True
    return False


if __name__ == "__main__":
    register_device("MPS")
    json.dump(train_and_score() | {"fp64_is_refused": fp64_is_refused()}, sys.stdout)
