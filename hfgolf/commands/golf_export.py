"""Fit a model into a number of bytes: hfgolf golf export runs/small --budget_bytes 2MB

Writes the folder RUN/golf: artifact.bin (the weights), score.py (a program that scores them and needs only torch and
numpy), the text it scores (tokens.bin, bytes.bin), ledger.json, table.json, certificate.json, and model/ with the same
weights for AutoModelForCausalLM. For an architecture other than Golf, unpack.py, which only reads the weights, replaces
score.py. Exits with 1 if the bytes don't fit, the round trip differs or the certificate fails.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hfgolf.commands.options import Answer, ScriptParser, add_source, bounded, bounded_bytes, check_output, take_source
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError
from hfgolf.system.wording import aligned, duration

if TYPE_CHECKING:
    from hfgolf.golf.export import Exported

_OF_THE_CONFIG = (
    *("budget_bytes", "count", "method", "allocation", "calibration_tokens"),
    *("evaluation", "stride", "adapt_rate"),
)


def main() -> Answer:
    parser = ScriptParser(__doc__)
    run_help = "run folder, such as runs/small: its model, text and golf section"
    add_source(parser, run_help, "model: run, folder or Hub name; with --files and --calibration_files")
    parser.add_argument("--files", nargs="+", help="text to score: paths, folders, globs or URLs, as in data.files")
    parser.add_argument("--calibration_files", nargs="+", help="text of the kind that the model was trained on")
    parser.add_argument("--text_column", default="text", help="column of tables, as in data.text_column (text)")
    parser.add_argument("--output", type=Path, help="new folder, or one of an earlier export (default: RUN/golf)")
    parser.add_argument("--budget_bytes", **bounded_bytes(1, 2**40, "what everything that counts may take"))
    parser.add_argument("--count", choices=("challenge", "everything"), help="what counts; default: golf.count")
    parser.add_argument("--code_files", nargs="+", type=Path, default=[], help="more files that count")
    parser.add_argument("--method", choices=("gptq", "nearest"), help="default: golf.method of the run")
    parser.add_argument("--allocation", choices=("curvature", "sdclip", "uniform"), help="default: golf.allocation")
    parser.add_argument("--calibration_tokens", **bounded(1, 2**40, "default: golf.calibration_tokens"))
    parser.add_argument("--evaluation", choices=("flat", "sliding", "documents"), help="default: golf.evaluation")
    parser.add_argument("--stride", **bounded(1, 2**24, "default: golf.stride"))
    parser.add_argument("--adapt_rate", **bounded(0.0, 1.0, "default: golf.adapt_rate"))
    parser.add_argument("--skip_before", action="store_true", help="do not score the weights before rounding")
    take_source(arguments := parser.parse_args())
    if arguments.model and not (arguments.files and arguments.calibration_files and arguments.output):
        raise UserError("--model: also give --files, --calibration_files and --output.")
    for name in ("files", "calibration_files", "text_column") if arguments.run else ():
        if getattr(arguments, name) != parser.get_default(name):
            raise UserError(f"--{name}: a run brings its own text; use --model for other text.")
    model = find_model(arguments.model) if arguments.model else ""
    output = arguments.output or arguments.run / "golf"
    if output.exists() and not (output / "certificate.json").is_file():
        raise UserError(f"--output: {output} exists and no export wrote it; name a new folder.")
    check_output("--output", output.parent)

    from hfgolf.golf.export import Settings, export
    from hfgolf.golf.ledger import OWN_NAMES
    from hfgolf.golf.source import model_source, run_source
    from hfgolf.system.signals import Signals
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    taken = set(OWN_NAMES)  # the files are side by side in the folder, and the ledger knows them by their names
    for path in arguments.code_files:
        if not path.is_file() or path.name in taken or path.name.startswith("."):
            raise UserError(
                f"--code_files: {path} is not a file, is hidden, or has the name of another file of the export."
            )
        taken.add(path.name)
    with Signals("before the end; nothing was written"), tempfile.TemporaryDirectory() as cache:
        if arguments.run:
            found = run_source(arguments.run)
        else:
            texts = arguments.files, arguments.calibration_files, arguments.text_column
            found = model_source(model, *texts, Path(cache))
        stated = {name: getattr(arguments, name) for name in _OF_THE_CONFIG if getattr(arguments, name) is not None}
        if stated.get("evaluation") == "flat":
            stated.setdefault("stride", None)  # that of the config is of its own evaluation
        golf = found.golf.replace(**stated)
        if golf.budget_bytes is None:
            raise UserError("--budget_bytes is missing, and the run's config has no golf.budget_bytes; state one.")
        settings = Settings(golf, arguments.code_files, arguments.skip_before)
        exported = export(found, settings, output, lambda line: print(line, file=sys.stderr, flush=True))
    data = {name: getattr(exported, name) for name in ("ledger", "table", "problems")}
    data |= {"folder": str(output), "certificate": exported.certificate.line}
    data["findings"] = _findings(exported)
    return Answer(data, _text(exported), problems=exported.problems)


def _text(exported: Exported) -> str:
    """Return the files, where their bytes are, and the score; bits per byte only if the certificate holds."""
    from hfgolf.golf.ledger import SCRIPT
    from hfgolf.golf.table import table_text

    quantized, ledger = exported.quantized, exported.ledger
    if quantized is None:
        return exported.certificate.line
    lines = [["file", "bytes", "counted", "sha256"]]
    for file in ledger["files"]:
        counted = "yes" if ledger["count"] in file["counted_by"] else "no"
        lines.append([file["name"], f"{file['bytes']:,}", counted, file["sha256"][:16]])
    total, budget = ledger["totals"][ledger["count"]], ledger["budget_bytes"]
    left = f"{abs(total - budget):,} bytes {'over' if total > budget else 'free'}"
    totals = ", ".join(f"{num_bytes:,} counting {count}" for count, num_bytes in ledger["totals"].items())
    parts = [
        f"{aligned(lines, 'lrll')}\n{total:,} of {budget:,} bytes, {left} ({totals})",
        table_text(exported.table["tensors"]),
    ]
    parts += ["\n".join(said)] if (said := _findings(exported)) else []
    before, after, seconds = (ledger[key] for key in ("before", "after", "seconds"))
    windows = after["mode"] if after["mode"] == "flat" else f"{after['mode']}, stride {after['stride']}"
    windows += f", adapting at a rate of {rate:g}" if (rate := ledger["settings"]["adapt_rate"]) else ""
    spent = ", ".join(f"{step} {duration(s)}" for step, s in seconds.items())
    change = f" ({after['bpb'] - before['bpb']:+.4f}; {before['bpb']:.4f} before rounding)" if before else ""
    is_golf = any(file["name"] == SCRIPT for file in ledger["files"])
    scorer = "by score.py on these files alone" if is_golf else "here, with the weights that unpack.py reads"
    rows = {
        "steps": f"D = {quantized.scale:.4g}, on average those of SDClip with k = {quantized.sdclip_k:.2f} at 6 bits",
        "scored": f"{scorer}, {windows}, {after['tokens']:,} tokens, {after['bytes']:,} bytes",
        "bits per byte": f"{after['bpb']:.4f}{change}",
        "time": f"{duration(sum(seconds.values()))}: {spent}",
        "folder": str(exported.folder),
    }
    score = [exported.certificate.line, *(f"{name:<15}{value}" for name, value in rows.items())]
    return "\n\n".join([*parts, "\n".join(score)])


def _findings(exported: Exported) -> list[str]:
    return [*(exported.quantized.findings if exported.quantized else ()), *exported.table.get("findings", ())]
