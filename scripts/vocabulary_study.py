"""Compare vocabulary sizes on your text: python scripts/vocabulary_study.py --files a.txt b.txt

Trains a BPE tokenizer of each size, like a run does, on evenly spaced slices of the files, and measures it on held-out
slices: tokens per character, bytes per token, the context tokens that cover some text, the embedding's share of the
model's parameters, and encoding speed. Size 256 means plain bytes (257 with the end-of-text token). Writes
vocabulary.md, vocabulary.json and vocabulary.png, and prints the table.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfgolf import palette
from hfgolf.command_line import load_config, run_command
from hfgolf.script_options import MARK, ScriptParser, check_output, within

DEFAULT = Path(__file__).parents[1] / "configs" / "small.yaml"


def main() -> None:
    parser = ScriptParser(
        __doc__, "Also takes train.py's options: --config FILE (configs/small.yaml) --section.key value."
    )
    sizes = [256, 1024, 4096, 16384, 50257]
    parser.add_argument("--files", nargs="+", type=Path, required=True, help="plain text files in UTF-8")
    parser.add_argument(
        "--vocab_sizes",
        nargs="+",
        type=within(256, 2**24 - 1),
        default=sizes,
        help="vocabulary sizes (256 1024 4096 16384 50257)",
    )
    parser.add_argument("--hidden_size", help="width of the model (default: the config's, 256)")
    parser.add_argument(
        "--context", type=within(1, 10**9), default=256, help="characters that the context should cover (256)"
    )
    parser.add_argument(
        "--max_bytes", type=within(1, 10**15), default=20_000_000, help="bytes of text to sample (20000000)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/vocabulary"), help="folder to write to (runs/vocabulary)"
    )
    arguments, run_options = parser.parse_known_args()
    if not any(option.split("=")[0] == "--config" for option in run_options):
        run_options = ["--config", str(DEFAULT), *run_options]
    if arguments.hidden_size is not None:
        run_options += ["--model.hidden_size", arguments.hidden_size]
    resolved = load_config(run_options)

    from hfgolf.data.pieces import num_text_bytes
    from hfgolf.durable import write_text
    from hfgolf.hardware import fingerprint
    from hfgolf.run.provenance import run_metadata
    from hfgolf.tools.vocabulary import measure_vocabulary, write_sample
    from hfgolf.train.console import show_log
    from hfgolf.train.signals import Signals

    show_log(True)
    folder = arguments.output
    check_output("--output", folder, besides=[folder / f"vocabulary.{kind}" for kind in ("json", "md", "png")])
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
        f" file{'s' if len(arguments.files) > 1 else ''}: BPE is trained on {megabytes(train_bytes)}, and everything is"
        f" measured on {megabytes(held_out_bytes)} of held-out text. The model has width {model.hidden_size} and"
        f" {model.num_hidden_layers} layers. Encoding speed is measured on {os.cpu_count()} cores."
    )
    page = f"# Vocabularies\n\n{about}\n\n{markdown(rows, arguments.context)}\n\n![Vocabularies](vocabulary.png)"
    write_text(folder / "vocabulary.json", json.dumps(record, indent=1))
    write_text(folder / "vocabulary.md", f"{page}\n\n{MARK}\n")
    draw(rows, f"{model.hidden_size} wide, {model.num_hidden_layers} layers", folder / "vocabulary.png")
    print(f"\n{about}\n\n{table(rows, arguments.context)}\nwrote vocabulary.md, .json and .png in {folder}")


def table(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return the table as text, one line per vocabulary."""
    columns = [heads(context), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*(row for row in columns if len(row) > 2), strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)) for row in columns)


def markdown(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return the table as Markdown."""
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
        return [f"{row['size']:,}", f"the text yields only {row['entries']:,} entries"]
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


@palette.style()
def draw(rows: Sequence[dict[str, Any]], model: str, path: Path) -> None:
    """Write the picture: tokens per character and the embedding's share of the model, over the vocabulary size."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "bytes_per_token" in row]
    entries = [row["entries"] for row in measured]
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    panels = (
        ("tokens_per_character", "tokens per character", "held-out text", "o-", "{:.2f}", "left"),
        ("embedding_share", "share of the parameters", f"embedding, {model}", "s--", "{:.0%}", "right"),
    )
    for axes, color, (key, label, title, style, form, side) in zip(
        figure.subplots(1, 2), palette.LINES, panels, strict=False
    ):
        values = [row[key] for row in measured]
        axes.plot(entries, values, style, color=color, linewidth=1.6, markersize=6)
        for x, y in zip(entries, values, strict=True):
            offset = (6 if side == "left" else -6, 5)  # points; away from the line
            axes.annotate(form.format(y), (x, y), offset, textcoords="offset points", ha=side, fontsize="small")
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
    palette.save(figure, path)


if __name__ == "__main__":
    run_command(main)
