"""Show a run's progress: one bar on a terminal or in a notebook, with log lines above it; elsewhere only lines.

The bar shows what the loop has on the host anyway: it never asks the device for anything. The slower it is to draw, the
less often it is drawn, so it costs less than a thousandth of the time (benchmarks/progress_bar.py measures this).
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from time import perf_counter
from typing import Any, TextIO

from tqdm import tqdm

from hfgolf.system.command import silence_if_closed
from hfgolf.system.errors import escaped
from hfgolf.system.redact import redact
from hfgolf.system.wording import clock_time, duration, labeled, rounded

logger = logging.getLogger("hfgolf")

_DRAW_EVERY_SECONDS = (0.1, 5.0)  # at most, and at least while steps are that fast
_SHARE = 0.0005  # of the time, for drawing
_LINE_EVERY_SECONDS = 30.0  # in a long evaluation, if there is no bar
_WORDS = {"compile": "compiling", "evaluate": "evaluating", "checkpoint": "saving"}
"""{kind of the stopwatch: what the bar says meanwhile}."""


class Console:
    """The bar of this process, if it has one, and the lines on its progress; a context that removes the bar."""

    def __init__(self) -> None:
        self._bar: Any = None  # tqdm's class is another one in notebooks
        self._while_shown = ExitStack()
        self._words = ""
        self._row: dict[str, Any] = {}
        self._best_val_loss = math.inf
        self._step, self._step_limit = 0, math.inf
        self._seconds, self._max_seconds = 0.0, math.inf
        self._first: tuple[int, float] | None = None
        """Step and seconds of steps after the first step here, whose own time says little of the others'."""
        self._step_seconds = self._line_at = 0.0
        self._tokens = (0, 1)
        self._evaluation_steps: Callable[[float], tuple[float, float]] = lambda last_step: (0.0, 0.0)
        self._work_at, self._work_left = 0.0, 0.0
        """Of an evaluation: when it began, and the seconds that it still takes."""
        self._draw_at = 0.0

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Show the bar if stderr is a terminal or this is a notebook. Warnings of libraries then appear above it."""
        is_notebook = _is_notebook()
        if self._bar is not None or not (sys.stderr.isatty() or is_notebook):
            return
        from tqdm.contrib.logging import logging_redirect_tqdm

        stream = sys.stdout if is_notebook else sys.stderr  # a notebook shows stderr on red
        self._bar = tqdm(total=1, bar_format=" ", file=stream, leave=False, dynamic_ncols=True)
        self._while_shown.callback(self._bar.close)
        self._while_shown.enter_context(logging_redirect_tqdm())
        self._while_shown.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)

    def close(self) -> None:
        """Remove the bar, if there is one, and forget the run."""
        self._while_shown.close()
        self.__init__()  # type: ignore[misc]

    def now(self, words: str) -> None:
        """Show in a word or two what the process does now."""
        self._work_left = 0.0
        if self._bar is not None and words != self._words:
            self._words = words
            if words:
                self._draw()

    def switch(self, kind: str) -> None:
        """Show what the stopwatch measures, unless that is ordinary steps."""
        self.now(_WORDS.get(kind, self._words if kind == "setup" else ""))

    def progress(self, share: float) -> None:
        """Show how far an evaluation is: on the bar, or in a line every half a minute."""
        now = perf_counter()
        if share == 0:
            self._work_at, self._line_at = now, now + _LINE_EVERY_SECONDS
            return
        self._work_left = (now - self._work_at) * (1 - share) / share
        self._words = f"evaluating {share:.0%}"
        if self._bar is not None and now >= self._draw_at:
            self._draw()
        elif self._bar is None and now >= self._line_at:
            self._line_at = now + _LINE_EVERY_SECONDS
            logger.info("%s, about %s left", self._words, duration(self._work_left))

    def begin(
        self,
        step_limit: float,
        max_seconds: float,
        tokens_per_step: int,
        tokens_per_epoch: int,
        evaluation_steps: Callable[[float], tuple[float, float]] = lambda last_step: (0.0, 0.0),
    ) -> None:
        """Note what ends the run, before its next step.

        evaluation_steps: returns, for the last step, how many steps take as long as all evaluations to come, and as
        those at the last step.
        """
        self._step_limit, self._max_seconds = step_limit, max_seconds
        self._tokens, self._evaluation_steps = (tokens_per_step, tokens_per_epoch), evaluation_steps

    def step(self, step: int, seconds: float, best_val_loss: float = math.inf, evaluating: float = 0.0) -> None:
        """Move the bar after a step. After the second, log the plan: only now is it known how long a step takes.

        seconds: of training so far; best_val_loss: infinity before the first; evaluating: those of the seconds that
        evaluations took. All over all sessions.
        """
        self._step, self._seconds, self._best_val_loss = step, seconds, best_val_loss
        self._step_seconds = seconds - evaluating
        if self._first is None:
            self._first = step, self._step_seconds
        elif step == self._first[0] + 1 < self._step_limit and seconds < self._max_seconds:  # else nothing is left
            logger.info("%s", labeled("plan", self._plan()))
        if self._bar is not None and perf_counter() >= self._draw_at:
            self._draw()

    def show(self, row: dict[str, Any], expected_steps: float) -> None:
        """Show a row of metrics.jsonl: as a line, or beside a bar as a short line if it has an evaluation."""
        self._row = row
        if self._bar is None or not (sys.stdout.isatty() or _is_notebook()):
            logger.info("%s", format_row(row, expected_steps))
        elif row["val_loss"] is not None:
            logger.info("%s", format_row(row, expected_steps, is_short=True))

    def _pace(self) -> float:
        """Return the seconds per step since the first step here, without evaluations; infinity before the second."""
        first_step, first_seconds = self._first or (self._step, 0.0)
        done = self._step - first_step
        return (self._step_seconds - first_seconds) / done if done > 0 else math.inf

    def _left(self) -> tuple[float, bool]:
        """Return the seconds to the end of the run, and whether train.max_minutes will end it, not its steps.

        The minutes count all evaluations but those at the last step.
        """
        pace, steps = self._pace(), self._step_limit - self._step
        by_steps, at_the_end = math.inf if steps > 0 else 0.0, 0.0
        if 0 < steps < math.inf:
            evaluations, last = self._evaluation_steps(self._step_limit)
            by_steps, at_the_end = (steps + evaluations - last) * pace, last * pace
        by_clock = max(0.0, self._max_seconds - self._seconds)
        if is_timed := by_clock < by_steps or self._step_limit == math.inf:
            is_known = by_clock > 0 and 0 < pace < math.inf
            at_the_end = self._evaluation_steps(self._step + by_clock / pace)[1] * pace if is_known else 0.0
        return min(by_steps, by_clock) + at_the_end, is_timed

    def _plan(self) -> str:
        left, is_timed = self._left()
        by_clock = self._max_seconds - self._seconds
        steps = self._step + by_clock / self._pace() if is_timed else self._step_limit
        tokens_per_step, tokens_per_epoch = self._tokens
        tokens = steps * tokens_per_step
        epochs = tokens / tokens_per_epoch
        amount = f"{steps:,.0f} steps, {rounded(tokens)} tokens, {epochs:,.{1 if epochs >= 1 else 2}f} epochs"
        time = f"{duration(left)}, until {clock_time(left)}"
        return f"about {amount} in {time}" if is_timed else f"{amount} in about {time}"

    def _draw(self) -> None:
        """Draw the bar: how far the run is, then its figures, then what it does now."""
        started_at = perf_counter()
        (left, is_timed), place, parts = self._left(), "", []
        if self._first is not None:
            if is_timed:
                self._bar.n = min(1.0, self._seconds / self._max_seconds)
                place = f"step {self._step:,} "
            else:
                self._bar.n = min(1.0, self._step / self._step_limit)
                place = f"step {self._step:,} of {self._step_limit:,.0f} "
            place += "|{bar}|"
        if self._row:
            parts.append(f"loss {self._row['train_loss']:.3f}")
        if self._best_val_loss < math.inf:
            parts.append(f"best val {self._best_val_loss:.3f}")
        if self._row and not self._words:
            parts.append(f"{self._row['tokens_per_second']:,.0f} tokens/s")
        if left < math.inf:
            parts.append(f"{_minutes(left + self._work_left)} left")
        if self._words:
            parts.append(self._words)
        self._bar.bar_format = f"{place} {'  '.join(parts)}"
        self._bar.refresh()
        now = perf_counter()
        soonest, latest = _DRAW_EVERY_SECONDS
        self._draw_at = now + min(latest, max(soonest, (now - started_at) / _SHARE))


console = Console()
"""The console of this process: it has one terminal."""


def _minutes(seconds: float) -> str:
    """Return "0:31", or "2:00:31"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which also runs in Colab and VS Code."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return shell is not None and "IPKernelApp" in shell.config


def format_row(row: dict[str, Any], expected_steps: float, is_short: bool = False) -> str:
    """Format a row of metrics.jsonl as one line. is_short: only what an evaluation has found, for above a bar."""
    total = "" if expected_steps == math.inf else f"/{max(expected_steps, row['step']):.0f}"
    parts = [
        f"step {row['step']}{total}",
        f"loss {row['train_loss']:.4f}",
    ]
    details = [
        f"lr {row['learning_rate']:.2e}",
        f"grad norm {row['grad_norm']:.2f}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"mfu {row['mfu']:.0%}",
    ]
    if row["val_loss"] is not None:
        averaged = f", averaged weights {row['val_loss_ema']:.4f}" if "val_loss_ema" in row else ""
        parts.append(f"val loss {row['val_loss']:.4f} ({row['val_bits_per_byte']:.4f} bits per byte){averaged}")
        if "old_val_loss" in row:
            parts.append(f"old text {row['old_val_bits_per_byte']:.4f} bits per byte")
    return "  ".join([*parts, *([] if is_short else details), f"{row['elapsed_seconds']:.0f} s"])


def show_log(is_main_process: bool, is_verbose: bool = False) -> None:
    """Print hfgolf's log lines, with secrets redacted, and silence what libraries say needlessly.

    The main process prints all of them, or without is_verbose what everyone wants to know; the others print warnings.
    """
    start_log(is_main_process, is_verbose)
    quiet_libraries()


def start_log(is_main_process: bool, is_verbose: bool) -> None:
    """Do the same without libraries, which take seconds to import."""
    handler = _LogHandler(sys.stdout)
    handler.setFormatter(_SafeFormatter("%(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    level = logging.DEBUG if is_verbose else logging.INFO
    logger.setLevel(level if is_main_process else logging.WARNING)


class _LogHandler(logging.StreamHandler[TextIO]):
    """Writes above a bar; goes silent when its reader is gone (closed terminal, `| head`): training continues."""

    def emit(self, record: logging.LogRecord) -> None:
        has_bar = self.stream.isatty() or _is_notebook()
        with tqdm.external_write_mode(file=self.stream) if has_bar else nullcontext():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            silence_if_closed(self.stream)
        else:
            super().handleError(record)


class _SafeFormatter(logging.Formatter):
    """Redacts each line and escapes its control characters, after the arguments are filled in."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return text if record.levelno < logging.WARNING else escaped(text, "\t")  # a warning is one line

    def format(self, record: logging.LogRecord) -> str:
        return shown(redact(super().format(record)))


def shown(text: str) -> str:
    """Return text with its control characters escaped: a sample could otherwise control the terminal."""
    return escaped(text, "\t\n")


def quiet_libraries() -> None:
    """Silence messages of libraries that mean nothing to hfgolf's users."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # "Removed shared tensor lm_head.weight": tied weights are one tensor, saved once
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # a sample longer than model_max_length (sequence_length); rotary positions have no limit
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
    # accelerate sets the threads of several CPU processes and says so; set-up decides them afterwards
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    # hfgolf reports these errors itself, in one line
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
