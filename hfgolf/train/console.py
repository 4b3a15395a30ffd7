"""Show a run's progress: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import re
import sys
from typing import Any, TextIO

from tqdm import tqdm

from hfgolf.command_line import silence_if_closed
from hfgolf.redact import redact

logger = logging.getLogger("hfgolf")


class Console:
    """Shows the rows of a run: as a progress bar if stderr is a terminal, else as lines."""

    def __init__(self, first_step: int, step_limit: float, is_main_process: bool) -> None:
        total = None if step_limit == math.inf else int(step_limit)
        hidden = not (is_main_process and sys.stderr.isatty())
        self._bar = tqdm(total=total, initial=first_step, unit="step", disable=hidden, dynamic_ncols=True)

    def show(self, row: dict[str, Any], expected_steps: float) -> None:
        """Show a row of metrics.jsonl."""
        if self._bar.disable:
            logger.info("%s", format_row(row, expected_steps))
            return
        self._bar.update(row["step"] - self._bar.n)
        self._bar.set_postfix_str(f"loss {row['train_loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s")
        if row["val_loss"] is not None:
            with tqdm.external_write_mode(file=sys.stderr):
                logger.info("%s", format_row(row, expected_steps))

    def close(self) -> None:
        self._bar.close()


def format_row(row: dict[str, Any], expected_steps: float) -> str:
    """Format a row of metrics.jsonl as one line."""
    total = "" if expected_steps == math.inf else f"/{max(expected_steps, row['step']):.0f}"
    parts = [
        f"step {row['step']}{total}",
        f"loss {row['train_loss']:.4f}",
        f"lr {row['learning_rate']:.2e}",
        f"grad norm {row['grad_norm']:.2f}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"mfu {row['mfu']:.0%}",
        f"{row['elapsed_seconds']:.0f} s",
    ]
    if row["val_loss"] is not None:
        averaged = f", averaged weights {row['val_loss_ema']:.4f}" if "val_loss_ema" in row else ""
        parts.insert(2, f"val loss {row['val_loss']:.4f} ({row['val_bits_per_byte']:.4f} bits per byte){averaged}")
        if "old_val_loss" in row:
            parts.insert(3, f"old text {row['old_val_bits_per_byte']:.4f} bits per byte")
    return "  ".join(parts)


def show_log(is_main_process: bool) -> None:
    """Print hfgolf's log lines, with secrets redacted: all from the main process, warnings from every process."""
    handler = _LogHandler(sys.stdout)
    handler.setFormatter(_SafeFormatter("%(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if is_main_process else logging.WARNING)
    quiet_libraries()


class _LogHandler(logging.StreamHandler[TextIO]):
    """Goes silent when its reader is gone (closed terminal, `| head`), so that training continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            silence_if_closed(self.stream)
        else:
            super().handleError(record)


class _SafeFormatter(logging.Formatter):
    """Redacts each line and escapes its control characters, after the arguments are filled in."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(redact(super().format(record)))


# C0 and C1 except tab and newline, and characters that reverse text (bidirectional controls, Unicode TR 36)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Return text with its control characters escaped: a sample could otherwise control the terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quiet_libraries() -> None:
    """Silence messages of libraries that mean nothing to hfgolf's users."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # "Removed shared tensor lm_head.weight": tied weights are one tensor, saved once
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # a sample longer than model_max_length (sequence_length); rotary positions have no limit
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
    # hfgolf reports these errors itself, in one line
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
