"""A run as an object: what its folder holds, for a notebook."""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfgolf.errors import UserError
from hfgolf.evaluate.sample import generate_text
from hfgolf.publish.hub import push_folder
from hfgolf.publish.load import load_exported
from hfgolf.report.report import render_page
from hfgolf.run.metrics import read_metrics
from hfgolf.run.record import read_run, read_summary, status

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TrainedRun:
    """A run, complete or not. It reads its folder when asked, so it also follows a run that trains elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        summary = self.summary
        if not summary:
            return f"<run {self.folder}: {status(read_run(self.folder))}>"
        return (
            f"<run {self.folder}: validation loss {summary['val_loss']:.4f},"
            f" {summary['val_bits_per_byte']:.4f} bits per byte after {summary['steps']:,} steps>"
        )

    @property
    def summary(self) -> dict[str, Any]:
        """The final figures, as in summary.json; empty if the run is not complete."""
        return read_summary(self.folder / "summary.json")

    @property
    def metrics(self) -> pd.DataFrame:
        """The rows of metrics.jsonl, by step; docs/metrics.md explains each column.

        `run.metrics.val_loss.dropna().plot()` draws the validation loss.
        """
        import pandas as pd

        rows = read_metrics(self.folder / "metrics.jsonl").rows
        return pd.DataFrame(rows).set_index("step")

    @property
    def model(self) -> PreTrainedModel:
        """The exported model, or of a run that is not complete its newest checkpoint, for inference.

        It is loaded once. Raises UserError if there is neither.
        """
        return self._loaded[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return load_exported(str(self.folder))

    def sample(self, prompt: str = "", **options: Any) -> str:
        """Return the prompt and its continuation by the model.

        options: max_new_tokens (100), temperature (0.8; 0: the most likely token), top_k (50), top_p (1), seed (0).
        """
        return generate_text(self.model, self.tokenizer, prompt, **options)

    def report(self) -> Report:
        """Return the report of the run, which a notebook shows."""
        return Report(render_page([read_run(self.folder)]), self.folder / "report.html")

    def push(self, repo_id: str, private: bool = False) -> str:
        """Push the exported model to the Hub, as `hfgolf push` does; return its address.

        repo_id: user/name. Raises UserError if the Hub refuses it, or the run is not complete.
        """
        if not self.summary:
            raise UserError(f"{self.folder} is not complete, so it has no model to push; continue it first.")
        return push_folder(self.folder / "model", repo_id, private, "Push with hfgolf")


class Report:
    """The page of a run. A notebook shows it; elsewhere, open the file."""

    def __init__(self, page: str, path: Path) -> None:
        self.page, self.path = page, path

    def __repr__(self) -> str:
        return f"<report {self.path}>"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that its styles and the notebook's stay apart."""
        return f'<iframe srcdoc="{html.escape(self.page)}" style="width: 100%; height: 60em; border: 0"></iframe>'
