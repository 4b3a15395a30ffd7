"""The whole model of a run whose processes hold only shards of it, for what one process does with it alone."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.shards import full_tensor
from hfgolf.train.run import Run


def whole_model(run: Run) -> PreTrainedModel | None:
    """Return the model with all of its weights. All processes call it.

    If it is sharded, that is a copy in the memory of the main process's host, and None on the other processes.
    """
    if not run.is_sharded:
        return run.raw_model
    model = None
    if run.accelerator.is_main_process:
        with torch.random.fork_rng([]):
            model = GolfForCausalLM(copy.deepcopy(run.golf_model.config))
    with torch.no_grad():
        own = {} if model is None else model.state_dict()
        for name, tensor in run.golf_model.state_dict(keep_vars=True).items():
            whole = full_tensor(tensor)  # all processes; one tensor at a time on the device
            if model is not None:
                own[name].copy_(whole)
    return model
