"""hfgolf: train a small GPT from text, fast, on the hardware you have, and trust the result.

Importing this package imports neither torch nor transformers. The public names load what they need on first use.
"""

from importlib import import_module
from typing import Any

from hfgolf import train as train  # a callable package; it imports the loop when called

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "GolfConfig": "hfgolf.model.configuration_golf",
    "GolfForCausalLM": "hfgolf.model.modeling_golf",
    "Muon": "hfgolf.optim.muon",
    "RunConfig": "hfgolf.config",
    "UserError": "hfgolf.errors",
    "load_config": "hfgolf.command_line",
    "training_memory": "hfgolf.measure.memory",
}
__all__ = sorted([*_PUBLIC_NAMES, "__version__", "train"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'hfgolf' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC_NAMES})
