"""Export a checkpoint as a model with its card: python scripts/export.py --run runs/small --checkpoint best

A run exports its best weights when it ends. Use this for a run that was killed, or for any other checkpoint.
"""

from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, check_output


def main() -> None:
    parser = ScriptParser(__doc__)
    parser.add_argument("--run", required=True, type=Path, help="run folder, such as runs/small")
    parser.add_argument("--checkpoint", help="best, latest or a path (default: best; latest if nothing was evaluated)")
    parser.add_argument("--output", type=Path, help="new folder for the model (default: model/ in the run folder)")
    arguments = parser.parse_args()
    if not any((arguments.run / name).exists() for name in ("config.yaml", "checkpoints")):
        raise UserError(f"--run: there is no run in {arguments.run}; name the folder of a run, such as runs/small.")
    if arguments.output is None and (arguments.run / "summary.json").exists():
        raise UserError(
            f"--output: {arguments.run} is complete and its model is in {arguments.run / 'model'}; name another folder."
        )
    if arguments.output is not None and arguments.output.exists():
        raise UserError(f"--output: {arguments.output} already exists; name a new folder.")
    output = arguments.output or arguments.run / "model"
    check_output("--output", output.parent)

    from hfgolf.run.folder import RunFolder
    from hfgolf.tools.export_checkpoint import export_checkpoint
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    step = export_checkpoint(RunFolder(arguments.run), arguments.checkpoint, output)
    print(f"exported step {step} to {output}")


if __name__ == "__main__":
    run_command(main)
