"""Export a checkpoint as a model with its card: hfgolf export runs/small --checkpoint best

A run exports its best weights when it ends. Use this for a run that was killed, or for any other checkpoint. It also
turns a native model into Golf and back, and writes one file for llama.cpp and Ollama:

    hfgolf export runs/small/model --to golf --output small-golf
    hfgolf export runs/small/model --to gguf --output small.gguf
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hfgolf.commands.options import Answer, ScriptParser, add_source, check_output, take_source
from hfgolf.config.sections import RunConfig
from hfgolf.run.find_model import find_model, models_here
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import of_averages, read_metrics
from hfgolf.run.record import read_json
from hfgolf.system.errors import UserError, writing
from hfgolf.system.wording import join_words, one_line


def main() -> Answer:
    parser = ScriptParser(__doc__)
    model_help = "model to convert: a run, a checkpoint, an exported model, or a Hub name"
    add_source(parser, "run folder, such as runs/small", model_help)
    parser.add_argument("--checkpoint", help="best, latest or a path (default: best; latest if nothing was evaluated)")
    parser.add_argument(
        "--output",
        type=Path,
        help="new folder for the model, or file for gguf (default: model/, model-native/ or model-f16.gguf in the run)",
    )
    parser.add_argument(
        "--to",
        choices=["golf", "native", "gguf"],
        help="golf: with hfgolf's modeling code; native: the architecture of transformers with the same logits, which"
        " loads without trust_remote_code; gguf: one file for llama.cpp, if it has that architecture (native, or golf"
        " if there is none)",
    )
    parser.add_argument(
        "--quantization",
        choices=["f16", "q8_0", "f32"],
        help="with gguf: how matrices are stored; q8_0: 8 bits per weight, and a scale for every 32 (f16)",
    )
    take_source(arguments := parser.parse_args())
    if arguments.quantization and arguments.to != "gguf":
        raise UserError("--quantization: only a GGUF file has it; add --to gguf.")
    quantization = arguments.quantization or "f16"
    names = {"native": "model-native", "gguf": f"model-{quantization}.gguf"}
    if arguments.run is not None:
        run, has_output = arguments.run, arguments.output is not None or arguments.to in names
        if not any((run / name).exists() for name in ("config.yaml", "checkpoints")):
            raise UserError(f"--run: there is no run in {run}; {models_here(str(run))}")
        if not has_output and (run / "summary.json").exists():
            raise UserError(f"--output: {run} is complete and its model is in {run / 'model'}; name another folder.")
    elif arguments.checkpoint is not None:
        raise UserError("--checkpoint: only a run has checkpoints; name it with --run.")
    elif arguments.to is None or arguments.output is None:
        raise UserError("--model: say what to convert it to and where, with --to and --output.")
    model = find_model(arguments.model) if arguments.model else ""
    output = arguments.output or arguments.run / names.get(arguments.to, "model")
    kind = "file" if arguments.to == "gguf" else "folder"
    if output.exists() and (arguments.output or arguments.to in names):
        raise UserError(f"--output: {output} already exists; name a new {kind}.")
    if arguments.to == "gguf":
        check_output("--output", output, ["gguf"])
    else:
        check_output("--output", output.parent)

    from hfgolf.publish.convert import convert_folder
    from hfgolf.publish.gguf import export_gguf
    from hfgolf.train.console import quiet_libraries

    def convert(model: str) -> str:
        if arguments.to == "gguf":
            return export_gguf(model, output, quantization)
        return convert_folder(model, output, arguments.to)

    quiet_libraries()
    if arguments.run is None:
        step, said = None, convert(model)
    elif arguments.to in names:
        with TemporaryDirectory() as scratch:
            golf = Path(scratch) / "model"
            step, _ = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, golf, is_golf=True)
            said = convert(str(golf))
    else:
        is_golf = arguments.to == "golf"
        step, said = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, output, is_golf=is_golf)
    what = model if step is None else f"step {step}"
    text = f"exported {what} to {output} as {said}"
    return Answer({"model": model or arguments.run, "step": step, "output": output, "form": said}, text)


def export_checkpoint(run: RunFolder, which: str | None, output: Path, *, is_golf: bool = False) -> tuple[int, str]:
    """Export a checkpoint's weights to `output`. Return its step, and the form of the model, as a person says it.

    Under optim.ema_export, exports the averaged weights. which: latest, best or a path; None: best, or latest if
    nothing was evaluated. is_golf: as Golf, even if there is a native form. Raises UserError if there is no such
    checkpoint, it is damaged, or `output` can't be written.
    """
    from safetensors.torch import load_file

    from hfgolf.checkpoint.contents import EMA_NAME
    from hfgolf.checkpoint.identity import read_identity, saved_config
    from hfgolf.checkpoint.store import STATE_NAME, Rejected, find_checkpoint, verify
    from hfgolf.evaluate.sample import generate_text
    from hfgolf.publish.convert import in_best_form
    from hfgolf.publish.export import export_model
    from hfgolf.publish.gguf import has_gguf
    from hfgolf.publish.load import load_exported
    from hfgolf.publish.model_card import model_card

    found = (find_checkpoint(run.checkpoints, name) for name in (("best", "latest") if which is None else (which,)))
    checkpoint = next((path.resolve() for path in found if path is not None and path.is_dir()), None)
    if checkpoint is None:
        raise UserError(f"--checkpoint: there is no {which or 'checkpoint'} in {run.checkpoints}; {_others(run)}.")
    try:
        step = verify(checkpoint)["step"]
        state = json.loads((checkpoint / STATE_NAME).read_text())
    except (Rejected, OSError, ValueError) as error:
        raise UserError(f"--checkpoint: {checkpoint} rejected: {one_line(error)}; {_others(run)}.") from None
    identity = read_identity(checkpoint)
    config = saved_config(identity)  # not config.yaml, which may be from a later start, or missing
    if not (checkpoint / "config.json").is_file():
        raise UserError(
            f"--checkpoint: {checkpoint} has no config.json: an older version saved it, or its weights are sharded;"
            f" continue the run with --train.resume {checkpoint}, and it exports its model at the end."
        )
    model, tokenizer = load_exported(str(checkpoint))
    model = model.cpu()
    if config.optim.ema_export:
        if not (checkpoint / EMA_NAME).is_file():
            raise UserError(f"--checkpoint: {checkpoint} has no averaged weights (optim.ema_export); {_others(run)}.")
        model.load_state_dict(load_file(checkpoint / EMA_NAME), strict=False)  # the file holds tied weights only once
    sample = generate_text(model, tokenizer, seed=config.run.seed)
    summary = {
        "step": step,
        "steps": state["step"],
        "tokens": state["tokens"],
        "weights": "ema" if config.optim.ema_export else "raw",
        "is_best": step == state["best_step"],
        "parameters": model.num_parameters(),
        "model": str(output),
        "sample": sample,
        "init_from": identity.get("init_from"),
        **_figures(run, config, step),
    }
    said = type(model).__name__
    if not is_golf:
        model, said = in_best_form(model, tokenizer(sample, verbose=False)["input_ids"])
    card = model_card(config, summary, model, has_gguf=has_gguf(model, tokenizer))
    with writing("--output", output):
        export_model(model, tokenizer, output, card)
    return step, said


def _others(run: RunFolder) -> str:
    from hfgolf.checkpoint.store import newest_first

    names = join_words(sorted(path.name for path in newest_first(run.checkpoints)))
    return f"available checkpoints: {names}" if names else "the run has no checkpoints"


def _figures(run: RunFolder, config: RunConfig, step: int) -> dict[str, Any]:
    """Return the figures of the evaluation at a step, with a summary's keys; {} if that step was not evaluated."""
    rows = read_metrics(run.metrics).rows if run.metrics.is_file() else []
    row: dict[str, Any] = next((row for row in reversed(rows) if row["step"] == step), {})
    row = of_averages(row) if config.optim.ema_export else row
    loss = row.get("val_loss")
    if loss is None or "val_tokens" not in row:
        return {}
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, 700.0)),
        "val_bits_per_byte": row["val_bits_per_byte"],
        "val_tokens": row["val_tokens"],
        "val_bytes": row["val_bytes"],
        **read_json(run.metadata).get("val_notes", {}),
    }
