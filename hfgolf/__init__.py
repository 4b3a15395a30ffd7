"""hfgolf: train a small GPT from text, fast, on the hardware you have, and trust the result.

Importing this package imports neither torch nor transformers. The public names load what they need on first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hfgolf import train as train

if TYPE_CHECKING:
    from hfgolf.api import TrainedRun as TrainedRun
    from hfgolf.api import fit as fit
    from hfgolf.api import open_run as open_run
    from hfgolf.config.parse import load_config as load_config
    from hfgolf.config.sections import RunConfig as RunConfig
    from hfgolf.measure.flops import training_flops_per_token as training_flops_per_token
    from hfgolf.measure.memory import training_memory as training_memory
    from hfgolf.model.configuration_golf import GolfConfig as GolfConfig
    from hfgolf.model.modeling_golf import GolfForCausalLM as GolfForCausalLM
    from hfgolf.optim.muon import Muon as Muon
    from hfgolf.optim.trainer import muon_for_trainer as muon_for_trainer
    from hfgolf.system.errors import UserError as UserError
    from hfgolf.train.hooks import Hook as Hook

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "GolfConfig": "hfgolf.model.configuration_golf",
    "GolfForCausalLM": "hfgolf.model.modeling_golf",
    "Hook": "hfgolf.train.hooks",
    "Muon": "hfgolf.optim.muon",
    "RunConfig": "hfgolf.config.sections",
    "TrainedRun": "hfgolf.api",
    "UserError": "hfgolf.system.errors",
    "fit": "hfgolf.api",
    "load_config": "hfgolf.config.parse",
    "muon_for_trainer": "hfgolf.optim.trainer",
    "open_run": "hfgolf.api",
    "training_flops_per_token": "hfgolf.measure.flops",
    "training_memory": "hfgolf.measure.memory",
}


class _CallablePackage(ModuleType):
    """What hfgolf.train is: a package, which Python puts there with any import from it, and a function."""

    def __call__(self, config: Any, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
        """Train a model and return the summary; see `hfgolf.api.train`."""
        from hfgolf.api import train

        return train(config, hooks)

    def __reduce__(self) -> tuple[Any, ...]:  # picklable, like a function
        return import_module, (self.__name__,)


train.__class__ = _CallablePackage
__all__ = sorted([*_PUBLIC_NAMES, "__version__", "train"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'hfgolf' has no attribute '{name}'")
    # what tqdm says in a notebook without ipywidgets, which hfgolf's bar does not need
    warnings.filterwarnings("ignore", message="IProgress not found")
    return getattr(import_module(_PUBLIC_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
