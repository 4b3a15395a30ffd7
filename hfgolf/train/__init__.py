"""Train a model from a config: the training loop and everything around it.

    summary = hfgolf.train("configs/small.yaml")

This package is callable. If `hfgolf.train` were a function, importing `hfgolf.train.loop` would replace it with this
package, which has the same name. A callable package is one object, in whatever order modules are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfgolf.command_line import ResolvedConfig
    from hfgolf.config import RunConfig
    from hfgolf.train.hooks import Hook


class _CallablePackage(ModuleType):
    def __call__(self, config: ResolvedConfig | RunConfig | str | Path, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
        """Train a model and return the summary: losses, bits per byte, speed and the model's folder.

        config: from `load_config`, a RunConfig, or the path or name of a YAML file. In a notebook, `hfgolf.fit` is the
        shorter way.
        Raises UserError for a problem that the user can fix, and SystemExit(128 + signal) if a signal ended the run.
        """
        from hfgolf.command_line import as_resolved
        from hfgolf.training import train

        return train(as_resolved(config), hooks=hooks)

    def __reduce__(self) -> tuple[Any, ...]:  # picklable, like a function
        import importlib

        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
