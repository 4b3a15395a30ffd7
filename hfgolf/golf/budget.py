"""The budget: which files count, what they take on disk, and whether that is within it.

Owns what an artifact needs beyond itself, the ledger and the gate. Does not know how an artifact is made.
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.checkpoint.identity import Change, rule
from hfgolf.config.parse import as_yaml
from hfgolf.config.sections import RunConfig
from hfgolf.golf.script import packed_script
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.system.redact import redact_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SCRIPT, TOKENIZER, CONFIG = "score.py", "tokenizer.json.xz", "config.yaml.xz"
COUNTS = ("challenge", "everything")
"""challenge: the program and the weights, as in Parameter Golf. everything: also what was needed to make them."""


def files_besides(
    config: GolfConfig, tokenizer: PreTrainedTokenizerFast, run_config: RunConfig | None
) -> dict[str, tuple[bytes, tuple[str, ...]]]:
    """Return {name: (content, those of COUNTS that count it)} of all that a budget must hold next to the artifact.

    run_config: what it takes to train the model again; None: it is not known.
    """
    files = {
        SCRIPT: (packed_script(config), COUNTS),
        TOKENIZER: (_packed(tokenizer.backend_tokenizer.to_str().encode()), ("everything",)),
    }
    if run_config is not None:
        files[CONFIG] = (_packed(training_config(run_config).encode()), ("everything",))
    return files


def bytes_besides(config: GolfConfig, tokenizer: PreTrainedTokenizerFast, run_config: RunConfig, count: str) -> int:
    """Return what the files next to the artifact take, of those that `count`, one of COUNTS, counts."""
    files = files_besides(config, tokenizer, run_config).values()
    return sum(len(content) for content, counted_by in files if count in counted_by)


def training_config(config: RunConfig) -> str:
    """Return the YAML to train a model again: the keys that affect the weights and are not at their defaults.

    Of files, only the names. So a resume, another machine, or another folder leaves it as it is, and with it the bytes
    that golf.count everything counts.
    """
    defaults, lines = RunConfig().flat(), list[str]()
    for dotted, value in config.flat().items():
        section, key = dotted.split(".")
        is_of_golf = section == "golf" and key != "forecast_every_steps"
        if value == defaults[dotted] or (rule(dotted) is Change.FREE and not is_of_golf):
            continue
        if rule(dotted) is Change.TEXT and isinstance(value, list):
            value = [name if "://" in name else os.path.basename(name) for name in value]
        if f"{section}:" not in lines:
            lines.append(f"{section}:")
        lines.append(f"  {key}: {as_yaml(redact_values(value))}")
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=2)  # a run asks again at each forecast and each grid
def _packed(content: bytes) -> bytes:
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


@dataclass(frozen=True)
class Entry:
    """A file on disk. counted_by: those of COUNTS that count it."""

    name: str
    bytes: int
    sha256: str
    counted_by: tuple[str, ...]


@dataclass(frozen=True)
class Ledger:
    """The files that a budget must hold. count: one of COUNTS."""

    entries: tuple[Entry, ...]
    count: str
    budget_bytes: int

    def total(self, count: str) -> int:
        """Return the bytes that count."""
        return sum(entry.bytes for entry in self.entries if count in entry.counted_by)

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line, and which file could give how many bytes; None if the files fit."""
        excess = self.total(self.count) - self.budget_bytes
        if excess <= 0:
            return None
        givers = sorted((e for e in self.entries if self.count in e.counted_by), key=lambda entry: -entry.bytes)
        could = [f"{e.name} could give {min(excess, e.bytes):,} of its {e.bytes:,}" for e in givers]
        return (
            f"{self.total(self.count):,} bytes are {excess:,} more than the budget of {self.budget_bytes:,}:"
            f" {', '.join(could)}."
        )

    def as_data(self) -> dict[str, Any]:
        """Return the ledger as plain JSON."""
        files = [asdict(entry) for entry in self.entries]
        totals = {count: self.total(count) for count in COUNTS}
        return {"budget_bytes": self.budget_bytes, "count": self.count, "totals": totals, "files": files}


def read_ledger(files: Mapping[Path, tuple[str, ...]], count: str, budget_bytes: int) -> Ledger:
    """Read files back from disk. files: {path: those of COUNTS that count it}. Raises OSError if one can't be read."""
    contents = {path: path.read_bytes() for path in files}
    entries = [
        Entry(path.name, len(content), hashlib.sha256(content).hexdigest(), files[path])
        for path, content in contents.items()
    ]
    return Ledger(tuple(entries), count, budget_bytes)
