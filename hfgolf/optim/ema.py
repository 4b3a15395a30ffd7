"""An exponential moving average (EMA) of a model's weights.

Owns the averages, their decay, and swapping them in for the weights. Does not know when that happens, or whether the
model is wrapped: it sees names and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hfgolf.optim.shards import copy_full, is_sharded, local_shards
from hfgolf.optim.state import state_dtype
from hfgolf.system.errors import UserError


class Ema:
    """Keep an exponential moving average of every parameter, in fp32 or wider.

    average <- decay * average + (1 - decay) * parameter, after Polyak & Juditsky, "Acceleration of stochastic
    approximation by averaging", 1992, but with exponential weights. The average starts at the current parameters, so
    build it once they are final: initialized, on their device, and `prepare`d.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], decay: float) -> None:
        self.decay = decay
        self._params = dict(named_parameters)
        self._averages = {
            name: param.detach().to(state_dtype(param), copy=True) for name, param in self._params.items()
        }

    def decay_at(self, step: int) -> float:
        """Return the decay after `step` updates. It is smaller at first, so that the initial weights fade quickly.

        min(decay, (1 + step) / (10 + step)), like num_updates in TensorFlow's tf.train.ExponentialMovingAverage: the
        mean age of the average is at most a tenth of the steps.
        """
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages with the parameters after `step` updates."""
        wide = [param.to(state_dtype(param)) for param in self._params.values()]  # no copy of fp32 parameters
        torch._foreach_lerp_(local_shards(self._averages.values()), local_shards(wide), 1 - self.decay_at(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by their averages inside the `with` block, and restore them bit for bit after it.

        The parameters stay the same objects, so this also works for a wrapped or compiled model. Inside the block they
        share the averages' memory: evaluate and save, but do not train. Enter autocast inside the block, because it
        caches the weights that it has cast.
        """
        if any(is_sharded(param) for param in self._params.values()):
            with self._copied_in():
                yield
            return
        # Swap storages, not contents: this allocates nothing for fp32 weights and cannot fail halfway.
        raw = {name: param.data for name, param in self._params.items()}
        averages = {name: average.to(raw[name].dtype) for name, average in self._averages.items()}
        try:
            self._point_at(averages)
            yield
        finally:
            self._point_at(raw)

    @contextmanager
    def _copied_in(self) -> Iterator[None]:
        """Do as `applied`, by copies of the shards: FSDP2 gathers from its own view of the parameters' storage."""
        with torch.no_grad():
            shards = local_shards(self._params.values())
        raw = [shard.clone() for shard in shards]
        try:
            torch._foreach_copy_(shards, local_shards(self._averages.values()))
            yield
        finally:
            torch._foreach_copy_(shards, raw)

    def _point_at(self, storages: dict[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.data = storages[name]

    def restart(self) -> None:
        """Reset the averages to the current parameters."""
        for name, param in self._params.items():
            self._averages[name].copy_(param.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, without copying them."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load saved averages, keeping the device and dtype of the current ones.

        Raises UserError, and changes nothing, if names or shapes differ.
        """
        missing, unknown = self._averages.keys() - state.keys(), state.keys() - self._averages.keys()
        if missing or unknown:
            difference = f"lacks {min(missing)}" if missing else f"has {min(unknown)}, which this model lacks"
            raise _mismatch(difference)
        for name, average in self._averages.items():
            saved, own = tuple(state[name].shape), tuple(average.shape)
            if saved != own:
                raise _mismatch(f"has shape {saved} for {name}, but here it is {own}")
        for name, average in self._averages.items():
            copy_full(average, state[name])


def _mismatch(difference: str) -> UserError:
    return UserError(f"the saved average of the weights {difference}; load it with the model that saved it")
