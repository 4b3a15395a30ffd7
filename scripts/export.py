"""Export a checkpoint as a model with its card: python scripts/export.py --run runs/small --checkpoint best

A run exports its best weights when it ends. Use this for a run that was killed, or for any other checkpoint. It also
writes a model in transformers' own architecture, which loads without trust_remote_code, turns such a model back, and
writes one file for llama.cpp and Ollama:

    python scripts/export.py --model runs/small/model --to native --output small-native
    python scripts/export.py --model runs/small/model --to gguf --output small.gguf
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.run.find_model import find_model, models_here
from hfgolf.script_options import ScriptParser, check_output


def main() -> None:
    parser = ScriptParser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="run folder, such as runs/small")
    source.add_argument("--model", help="model to convert: a run, a checkpoint, an exported model, or a Hub name")
    parser.add_argument("--checkpoint", help="best, latest or a path (default: best; latest if nothing was evaluated)")
    parser.add_argument(
        "--output",
        type=Path,
        help="new folder for the model, or file for gguf (default: model/, model-native/ or model-f16.gguf in the run)",
    )
    parser.add_argument(
        "--to",
        choices=["golf", "native", "gguf"],
        help="golf: with hfgolf's modeling code; native: the architecture of transformers with the same logits; gguf:"
        " one file for llama.cpp, if it has that architecture (golf)",
    )
    parser.add_argument(
        "--xielu",
        action="store_true",
        help="with native: write Apertus' squared ReLU as xIELU with fixed constants, for tools that know only that",
    )
    parser.add_argument(
        "--quantization",
        choices=["f16", "q8_0", "f32"],
        help="with gguf: how matrices are stored; q8_0: 8 bits per weight, and a scale for every 32 (f16)",
    )
    arguments = parser.parse_args()
    if arguments.quantization and arguments.to != "gguf":
        raise UserError("--quantization: only a GGUF file has it; add --to gguf.")
    if arguments.xielu and arguments.to != "native":
        raise UserError("--xielu: only a native model has it; add --to native.")
    quantization = arguments.quantization or "f16"
    names = {"native": "model-native", "gguf": f"model-{quantization}.gguf"}
    if arguments.run is not None:
        _check_run(arguments.run, arguments.output is not None or arguments.to in names)
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
    from hfgolf.run.folder import RunFolder
    from hfgolf.tools.export_checkpoint import export_checkpoint
    from hfgolf.train.console import quiet_libraries

    def convert(model: str) -> str:
        if arguments.to == "gguf":
            return export_gguf(model, output, quantization)
        return convert_folder(model, output, arguments.to, arguments.xielu)

    quiet_libraries()
    if arguments.run is None:
        print(f"exported {model} to {output} as {convert(model)}")
    elif arguments.to in names:
        with TemporaryDirectory() as scratch:
            golf = Path(scratch) / "model"
            step = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, golf)
            said = convert(str(golf))
        print(f"exported step {step} to {output} as {said}")
    else:
        step = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, output)
        print(f"exported step {step} to {output}")


def _check_run(run: Path, has_output: bool) -> None:
    if not any((run / name).exists() for name in ("config.yaml", "checkpoints")):
        raise UserError(f"--run: there is no run in {run}; {models_here(str(run))}")
    if not has_output and (run / "summary.json").exists():
        raise UserError(f"--output: {run} is complete and its model is in {run / 'model'}; name another folder.")


if __name__ == "__main__":
    run_command(main)
