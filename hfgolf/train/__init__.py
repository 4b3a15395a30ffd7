"""Train as a config says: the training loop and what it needs around it.

    summary = hfgolf.train(hfgolf.load_config(["--config", "configs/small.yaml"]))

The package is callable. A function `hfgolf.train` would be replaced by this package of the same name as soon as anybody
imports `hfgolf.train.loop`; this way there is one object, whoever imports what first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfgolf.command_line import ResolvedConfig
    from hfgolf.config import RunConfig


class _CallablePackage(ModuleType):
    def __call__(self, config: ResolvedConfig | RunConfig) -> dict[str, Any]:
        """Train as the config says and return the summary: losses, bits per byte, speed, and the model's folder.

        config: from `load_config`, or a RunConfig.
        Raises UserError for what a person can mend, SystemExit(128 + signal) if a signal ended the run after a save.
        """
        from hfgolf.command_line import ResolvedConfig
        from hfgolf.train.loop import train

        return train(config if isinstance(config, ResolvedConfig) else ResolvedConfig.from_code(config))

    def __reduce__(self) -> tuple[Any, ...]:  # a function can be pickled, so this can too
        import importlib

        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
