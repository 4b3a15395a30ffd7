"""Compare sizes of a vocabulary on your text: python scripts/vocabulary_study.py --files a.txt b.txt

Trains a BPE tokenizer of each size as a run would, on slices taken evenly from the files, and measures it on slices
that it was not trained on: tokens a character, bytes a token, the tokens of context that cover some text, what the
embedding takes of the model's parameters, and encoding speed. 256 means bytes, and is 257 with the end of text. Writes
vocabulary.md, vocabulary.json and vocabulary.png and prints the table.
"""

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfgolf import palette
from hfgolf.command_line import load_config, run_command
from hfgolf.script_options import ScriptParser, check_output, within

DEFAULT = Path(__file__).parents[1] / "configs" / "small.yaml"


def main() -> None:
    parser = ScriptParser(
        description=__doc__,
        epilog="All else is as train.py takes it: --config FILE (configs/small.yaml) --model.num_hidden_layers 12.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = [256, 1024, 4096, 16384, 50257]
    parser.add_argument("--files", nargs="+", type=Path, required=True, help="plain text in UTF-8")
    parser.add_argument(
        "--vocab_sizes",
        nargs="+",
        type=within(256, 2**24 - 1),
        default=sizes,
        help="entries (256 1024 4096 16384 50257)",
    )
    parser.add_argument("--hidden_size", help="width of the model (the config's, 256)")
    parser.add_argument(
        "--context", type=within(1, 10**9), default=256, help="characters that the context is to cover (256)"
    )
    parser.add_argument(
        "--max_bytes", type=within(1, 10**15), default=20_000_000, help="of text that is sampled (20000000)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/vocabulary"), help="folder (runs/vocabulary)")
    arguments, of_run = parser.parse_known_args()
    if not any(option.split("=")[0] == "--config" for option in of_run):
        of_run = ["--config", str(DEFAULT), *of_run]
    if arguments.hidden_size is not None:
        of_run += ["--model.hidden_size", arguments.hidden_size]
    resolved = load_config(of_run)

    from hfgolf.data.pieces import num_text_bytes
    from hfgolf.durable import write_text
    from hfgolf.hardware import fingerprint
    from hfgolf.run.provenance import run_metadata
    from hfgolf.tools.vocabulary import measure_vocabulary, write_sample
    from hfgolf.train.console import show_log
    from hfgolf.train.signals import Signals

    show_log(True)
    folder = check_output("--output", arguments.output)
    rows: list[dict[str, Any]] = []
    with Signals("before the end; nothing was written"), tempfile.TemporaryDirectory() as scratch:
        sample = write_sample(arguments.files, arguments.max_bytes, Path(scratch))
        for size in sorted(set(arguments.vocab_sizes)):
            found = measure_vocabulary(size, sample, resolved.config, arguments.context, Path(scratch))
            rows.append({"size": size} | ({"entries": found} if isinstance(found, int) else dataclasses.asdict(found)))
        train_bytes, held_out_bytes = num_text_bytes(sample.train), num_text_bytes(sample.held_out)
    model = resolved.config.model
    record = {
        "files": [str(path) for path in arguments.files],
        "file_bytes": sample.file_bytes,
        "train_bytes": train_bytes,
        "held_out_bytes": held_out_bytes,
        "context_characters": arguments.context,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "vocabularies": rows,
        "metadata": run_metadata(resolved, fingerprint()),
    }
    about = (
        f"{megabytes(train_bytes + held_out_bytes)} of {megabytes(sample.file_bytes)} in {len(arguments.files)}"
        f" file{'s' if len(arguments.files) > 1 else ''}: BPE is trained on {megabytes(train_bytes)} and everything"
        f" measured on {megabytes(held_out_bytes)} that it did not see. The model is {model.hidden_size} wide and"
        f" {model.num_hidden_layers} layers deep. Speed is that of {os.cpu_count()} cores."
    )
    page = f"# Vocabularies\n\n{about}\n\n{markdown(rows, arguments.context)}\n\n![Vocabularies](vocabulary.png)\n"
    write_text(folder / "vocabulary.json", json.dumps(record, indent=1))
    write_text(folder / "vocabulary.md", page)
    draw(rows, f"{model.hidden_size} wide, {model.num_hidden_layers} layers", folder / "vocabulary.png")
    print(f"\n{about}\n\n{table(rows, arguments.context)}\nwrote vocabulary.md, .json and .png in {folder}")


def table(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return a line for each vocabulary."""
    columns = [heads(context), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*(row for row in columns if len(row) > 2), strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)) for row in columns)


def markdown(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return the same as a table in Markdown."""
    lines = [heads(context), ["---:"] * len(heads(context)), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def heads(context: int) -> list[str]:
    return [
        "vocabulary",
        "tokens/character",
        "bytes/token",
        f"tokens for {context:,} characters",
        "embedding",
        "of the model",
        "encoding",
        "decodes exactly",
    ]


def cells(row: dict[str, Any]) -> list[str]:
    if "bytes_per_token" not in row:
        return [f"{row['size']:,}", f"the text gives only {row['entries']:,} entries"]
    return [
        f"{row['entries']:,}",
        f"{row['tokens_per_character']:.3f}",
        f"{row['bytes_per_token']:.3f}",
        f"{row['context_tokens']:,}",
        f"{row['embedding_parameters']:,}",
        f"{row['embedding_share']:.1%}",
        f"{row['bytes_per_second'] / 1e6:,.1f} MB/s",
        "yes" if row["is_exact"] else "NO",
    ]


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"


def draw(rows: Sequence[dict[str, Any]], model: str, path: Path) -> None:
    """Write the picture: over the vocabulary, what it saves in tokens and what it takes of the model."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "bytes_per_token" in row]
    entries = [row["entries"] for row in measured]
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    panels = (
        ("tokens_per_character", "tokens a character", "text it was not trained on", "o-", "{:.2f}", "left"),
        ("embedding_share", "share of the parameters", f"embedding, {model}", "s--", "{:.0%}", "right"),
    )
    for axes, color, (key, label, title, style, form, side) in zip(
        figure.subplots(1, 2), palette.LINES, panels, strict=False
    ):
        values = [row[key] for row in measured]
        axes.plot(entries, values, style, color=color, linewidth=1.6, markersize=6)
        for x, y in zip(entries, values, strict=True):
            beside = (6 if side == "left" else -6, 5)  # where the line does not pass
            axes.annotate(form.format(y), (x, y), beside, textcoords="offset points", ha=side, fontsize="small")
        axes.set(
            xscale="log",
            xlabel="vocabulary (entries)",
            ylabel=label,
            title=title,
            ylim=(0, 1.15 * max(values, default=1)),
        )
        axes.set_xticks(entries, [f"{number:,}" for number in entries], rotation=30)
        axes.minorticks_off()
        axes.margins(x=0.12)
        axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    run_command(main)
