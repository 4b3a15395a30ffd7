"""Push a model to the Hugging Face Hub: hfgolf push runs/small --repo user/name

Or any exported folder, such as a milestone of a run, to a branch that `from_pretrained` takes as its revision:

    hfgolf push runs/small/milestones/chck_10M --repo user/name --revision chck_10M

Or a GGUF file, to a repository of its own whose card names the model:

    hfgolf push small.gguf --repo user/name-gguf --base_model user/name
"""

import re
from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, add_source, take_source
from hfgolf.config.sections import REPOSITORY
from hfgolf.run.find_model import models_here
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError
from hfgolf.system.wording import shortened


def main() -> Answer:
    parser = ScriptParser(__doc__)
    add_source(parser, "run folder, such as runs/small, whose model to push", "exported folder, or GGUF file")
    parser.add_argument("--base_model", help="with a GGUF file: the repository of the model that it was made from")
    parser.add_argument("--repo", required=True, help="repository, as user/name; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--message", default="Push with hfgolf", help="commit message (Push with hfgolf)")
    parser.add_argument("--revision", help="branch, which is made if there is none, without the files of main (main)")
    parser.add_argument("--tag", help="name to give this version, such as v1.0; refused if the repository has it")
    parser.add_argument(
        "--format",
        choices=["auto", "golf", "native"],
        default="auto",
        help="auto: native, which loads without trust_remote_code, if transformers has the architecture (auto)",
    )
    take_source(arguments := parser.parse_args())
    if not re.match(REPOSITORY, arguments.repo):
        raise UserError(f"--repo: {shortened(arguments.repo)} names no repository; allowed: user/name.")
    model = Path(arguments.model) if arguments.model else _model_of(arguments.run)
    is_gguf = model.suffix == ".gguf" and model.is_file()
    if arguments.base_model and not is_gguf:
        raise UserError("--base_model: only a GGUF file has it; other models name in their card what they began with.")
    if arguments.format != "auto" and is_gguf:
        raise UserError("--format: only a folder has it; a GGUF file is pushed as it is.")
    if not is_gguf and not (model / "config.json").is_file():
        raise UserError(f"--model: there is no exported model in {model}; {models_here(str(model))}")

    from hfgolf.publish.hub import push_model
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    how = {name: getattr(arguments, name) for name in ("private", "message", "format", "revision", "tag", "base_model")}
    pushed = push_model(model, arguments.repo, **how)
    return Answer({"pushed": pushed}, f"pushed to {pushed}")


def _model_of(run: Path) -> Path:
    """Return the model of a run. Raises UserError if there is none, or it is not what the run exported."""
    if not run.is_dir():
        raise UserError(f"--run: there is no run {run}; {models_here(str(run))}")
    if not (run / "model" / "config.json").is_file():
        raise UserError(f"--run: there is no exported model in {run / 'model'}; a run writes it when it ends.")
    folder = RunFolder(run)
    if damage := folder.find_damage() if folder.summary.is_file() else None:
        raise UserError(f"--run: {damage}, so the card says nothing of these files; restore them.")
    return folder.model
