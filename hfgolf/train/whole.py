"""The whole model of a run whose processes hold only shards of it, for what one process does with it alone."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from hfgolf.checkpoint.contents import gathered
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.train.run import Run


def whole_model(run: Run) -> PreTrainedModel | None:
    """Return the model with all of its weights. All processes call it.

    If it is sharded, that is a copy in the memory of the main process's host, and None on the other processes.
    """
    if not run.is_sharded:
        return run.raw_model
    is_main = run.accelerator.is_main_process
    weights = gathered(run.golf_model.state_dict(keep_vars=True), is_main)
    if not is_main:
        return None
    with torch.random.fork_rng([]):
        model = GolfForCausalLM(copy.deepcopy(run.golf_model.config))
    model.load_state_dict(weights)
    return model
