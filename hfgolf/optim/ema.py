"""An exponential moving average of a model's weights, kept beside them.

Owns the averages, how fast they move and putting them in the weights' place for a while. Refuses to know when that
happens, and whether the model is wrapped: it sees names and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hfgolf.config import OptimConfig
from hfgolf.errors import UserError
from hfgolf.optim.state import state_dtype


def ema_decay(optim: OptimConfig, tokens_per_step: int) -> float | None:
    """Return the decay of a step, between 0 and 1, or None where no average is kept."""
    if optim.ema_half_life_tokens is not None:
        return float(0.5 ** (tokens_per_step / optim.ema_half_life_tokens))
    return optim.ema_decay


class Ema:
    """Average every parameter over the updates, in fp32 (or wider): decay * average + (1 - decay) * weight.

    Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", 1992, with weights that fall
    exponentially into the past. The average begins as the parameters are now, so build it where they are final:
    initialised, on their device, and `prepare`d.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], decay: float) -> None:
        self.decay = decay
        self._params = dict(named_parameters)
        self._averages = {
            name: param.detach().to(state_dtype(param), copy=True) for name, param in self._params.items()
        }

    def decay_at(self, step: int) -> float:
        """Return the decay used after `step` updates: smaller at first, so that the first weights do not linger.

        min(decay, (1 + step) / (10 + step)), as num_updates in TensorFlow's tf.train.ExponentialMovingAverage.
        """
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the parameters as they are after `step` updates."""
        wide = [param.to(state_dtype(param)) for param in self._params.values()]  # the parameter itself where fp32
        torch._foreach_lerp_(list(self._averages.values()), wide, 1 - self.decay_at(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the parameters be their averages inside the `with`, and bit for bit themselves after it.

        The parameters stay the same objects, so a wrapped or compiled model follows. Inside, they share the memory of
        the averages: evaluate and save, but don't train. Enter autocast inside, it caches the weights it has cast.
        """
        # storages instead of contents: nothing is allocated for fp32 weights, and it can not fail half way.
        # FSDP2 would not notice: it gathers from its own view of the first storage
        raw = {name: param.data for name, param in self._params.items()}
        averages = {name: average.to(raw[name].dtype) for name, average in self._averages.items()}
        try:
            self._point_at(averages)
            yield
        finally:
            self._point_at(raw)

    def _point_at(self, storages: dict[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.data = storages[name]

    def restart(self) -> None:
        """Begin anew from the parameters as they are now."""
        for name, param in self._params.items():
            self._averages[name].copy_(param.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages themselves, no copies, by parameter name."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over saved averages; they keep the device and dtype they have here.

        UserError where names or shapes differ; nothing has been changed then.
        """
        missing, unknown = self._averages.keys() - state.keys(), state.keys() - self._averages.keys()
        if missing or unknown:
            difference = f"lacks {min(missing)}" if missing else f"has {min(unknown)}, which this model lacks"
            raise _mismatch(difference)
        for name, average in self._averages.items():
            if state[name].shape != average.shape:
                raise _mismatch(f"holds {tuple(state[name].shape)} for {name}, here it is {tuple(average.shape)}")
        for name, average in self._averages.items():
            average.copy_(state[name])


def _mismatch(difference: str) -> UserError:
    return UserError(f"the saved average of the weights {difference}: load it with the model that saved it")
