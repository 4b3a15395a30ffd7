"""Export a checkpoint as a model with its card: python scripts/export.py --run runs/small --checkpoint best

A run exports its best weights when it ends. Use this for a run that was killed, or for any other checkpoint. It also
writes a model in transformers' own architecture, which loads without trust_remote_code, and turns such a model back:

    python scripts/export.py --model runs/small/model --to native --output small-native
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, check_output


def main() -> None:
    parser = ScriptParser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="run folder, such as runs/small")
    source.add_argument("--model", help="exported model, a folder or a name on the Hub, to convert")
    parser.add_argument("--checkpoint", help="best, latest or a path (default: best; latest if nothing was evaluated)")
    parser.add_argument(
        "--output", type=Path, help="new folder for the model (default: model/ or model-native/ in the run)"
    )
    parser.add_argument(
        "--to",
        choices=["golf", "native"],
        help="golf: with hfgolf's modeling code; native: the architecture of transformers with the same logits (golf)",
    )
    parser.add_argument(
        "--xielu",
        action="store_true",
        help="with native: write Apertus' squared ReLU as xIELU with fixed constants, for tools that know only that",
    )
    arguments = parser.parse_args()
    if arguments.xielu and arguments.to != "native":
        raise UserError("--xielu: only a native model has it; add --to native.")
    if arguments.run is not None:
        _check_run(arguments.run, arguments.output is not None or arguments.to == "native")
    elif arguments.checkpoint is not None:
        raise UserError("--checkpoint: only a run has checkpoints; name it with --run.")
    elif arguments.to is None or arguments.output is None:
        raise UserError("--model: say what to convert it to and where, with --to and --output.")
    output = arguments.output or arguments.run / ("model-native" if arguments.to == "native" else "model")
    if output.exists() and (arguments.output or arguments.to == "native"):
        raise UserError(f"--output: {output} already exists; name a new folder.")
    check_output("--output", output.parent)

    from hfgolf.publish.convert import convert_folder
    from hfgolf.run.folder import RunFolder
    from hfgolf.tools.export_checkpoint import export_checkpoint
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    if arguments.run is None:
        said = convert_folder(arguments.model, output, arguments.to, arguments.xielu)
        print(f"exported {arguments.model} to {output} as {said}")
    elif arguments.to == "native":
        with TemporaryDirectory() as scratch:
            golf = Path(scratch) / "model"
            step = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, golf)
            said = convert_folder(str(golf), output, "native", arguments.xielu)
        print(f"exported step {step} to {output} as {said}")
    else:
        step = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, output)
        print(f"exported step {step} to {output}")


def _check_run(run: Path, has_output: bool) -> None:
    if not any((run / name).exists() for name in ("config.yaml", "checkpoints")):
        raise UserError(f"--run: there is no run in {run}; name the folder of a run, such as runs/small.")
    if not has_output and (run / "summary.json").exists():
        raise UserError(f"--output: {run} is complete and its model is in {run / 'model'}; name another folder.")


if __name__ == "__main__":
    run_command(main)
