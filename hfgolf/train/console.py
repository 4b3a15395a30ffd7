"""What a person sees while a run trains: a progress bar on a terminal, plain lines elsewhere."""

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
    """Shows the rows of a run: a bar if stderr is a terminal, plain lines elsewhere."""

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
    """Return a row of metrics.jsonl as a line for a person."""
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
    return "  ".join(parts)


def show_log(is_main_process: bool) -> None:
    """Print hfgolf's log lines, without secrets, from the main process only; warnings come from every process."""
    handler = _LogHandler(sys.stdout)
    handler.setFormatter(_SafeFormatter("%(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if is_main_process else logging.WARNING)
    quiet_libraries()


class _LogHandler(logging.StreamHandler[TextIO]):
    """Falls silent when nobody reads any more (a closed terminal, `| head`), because training goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            silence_if_closed(self.stream)
        else:
            super().handleError(record)


class _SafeFormatter(logging.Formatter):
    """Redacts a line, and shows its control characters, once it is whole: only then its arguments are in it."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(redact(super().format(record)))


# C0 and C1 but tab and newline, and what reverses the order of a line (Unicode TR 36)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Return a text with its control characters as escapes: a sample could else set the terminal's title, or worse."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quiet_libraries() -> None:
    """Keep what says nothing to a user of hfgolf off the terminal."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # "Removed shared tensor lm_head.weight": tied weights are one tensor, and saved once
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # a sample longer than model_max_length, which is sequence_length; rotary positions go on
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
    # hfgolf says it in one line
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
