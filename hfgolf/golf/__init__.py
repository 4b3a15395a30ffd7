"""Golf: the best model that fits in a number of bytes. Quantize, pack, score and verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfgolf.golf.packing import Packed as Packed
    from hfgolf.golf.packing import pack as pack


def __getattr__(name: str) -> Any:
    if name not in ("Packed", "pack"):
        raise AttributeError(f"module 'hfgolf.golf' has no attribute '{name}'")
    from hfgolf.golf import packing

    return getattr(packing, name)
