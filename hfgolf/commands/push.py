"""Push a run's model to the Hugging Face Hub: hfgolf push --run runs/small --repo user/name"""

from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser
from hfgolf.run.find_model import models_here
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("--run", required=True, type=Path, help="run folder, such as runs/small")
    parser.add_argument("--repo", required=True, help="repository, as user/name; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--message", default="Push with hfgolf", help="commit message (Push with hfgolf)")
    parser.add_argument(
        "--format",
        choices=["auto", "golf", "native"],
        default="auto",
        help="auto: native, which loads without trust_remote_code, if transformers has the architecture (auto)",
    )
    arguments = parser.parse_args()
    if not arguments.run.is_dir():
        raise UserError(f"--run: there is no run {arguments.run}; {models_here(str(arguments.run))}")
    model = arguments.run / "model"
    if not (model / "config.json").is_file():
        raise UserError(f"--run: there is no exported model in {model}; a run writes it when it ends.")
    run = RunFolder(arguments.run)
    if damage := run.find_damage() if run.summary.is_file() else None:
        raise UserError(f"--run: {damage}, so the card says nothing of these files; restore them.")

    from hfgolf.publish.hub import push_folder
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    pushed = push_folder(model, arguments.repo, arguments.private, arguments.message, arguments.format)
    return Answer({"pushed": pushed}, f"pushed to {pushed}")
