"""Push an exported model to the Hub. A failure is a warning in a run, and an error in a script.

A run pushes in a separate process and never waits for it without a limit: not during training, not on a signal and not
at the end. Knows nothing about the folder except which files an export writes; convert.py gives it the native form.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from hfgolf.publish.model_card import gguf_card
from hfgolf.system.command import own_command, run_command
from hfgolf.system.durable import write_text
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line

logger = logging.getLogger(__name__)

RESPONSE_TIMEOUT_SECONDS = 60  # huggingface_hub itself would wait forever
PUSH_TIMEOUT_SECONDS = 300  # plus the time to upload the files at _SLOW_BYTES_PER_SECOND
_SLOW_BYTES_PER_SECOND = 500_000

_MODEL = Path(__file__).parents[1] / "model"
_CODE = ("configuration_golf.py", "layers_golf.py", "modeling_golf.py")
_RESULTS = ".eval_results"  # where the Hub looks for results on its benchmarks
_INDEX = "model.safetensors.index.json"
# The files that an export writes, for any tokenizer. Besides the parts of weights that the index names, nothing else
# leaves the machine.
_EXPORTED = (
    *("README.md", "loss.png", "config.json", "generation_config.json"),
    *("model.safetensors", _INDEX),
    *_CODE,
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)


def push_model(
    model: Path,
    repo_id: str,
    private: bool,
    message: str,
    format: str = "auto",
    revision: str | None = None,
    tag: str | None = None,
    base_model: str | None = None,
) -> str:
    """Create the repository if needed, upload a model in one commit, and return the repository's URL.

    model: an exported folder, or a GGUF file, which gets a card that names base_model, the repository of the model that
    it was made from. format: as hub.format, for a folder; what was pushed follows the URL if that was a choice.
    revision: a branch, which begins without the files of main; None: main. tag: for the commit. First sets repo_id in
    the card's example. huggingface_hub reads HF_ENDPOINT and the token. Raises UserError if the Hub is unreachable,
    refuses or does not respond, if `private` is true but the repository is public, if there is such a tag, if a file is
    a link, if card or weights are missing, if there is no native form but it was asked for, or if a file is not GGUF.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import get_session

    api = HfApi()
    get_session().timeout = RESPONSE_TIMEOUT_SECONDS
    with tempfile.TemporaryDirectory() as scratch:
        if model.is_file():
            card, files, said = *_files_of_gguf(model, repo_id, base_model, Path(scratch)), None
        else:
            card, files, said = _files_of_folder(model, repo_id, format, Path(scratch))
        try:
            url = api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: the account's default
            if private and not api.model_info(url.repo_id).private:
                raise UserError(f"{repo_id} is already public; make it private or use another name.")
            if tag and tag in {ref.name for ref in api.list_repo_refs(url.repo_id).tags}:
                raise UserError(f"--tag: {repo_id} already has the tag {tag}, so nothing was pushed; use another name.")
            if revision:
                first_commit = api.list_repo_commits(url.repo_id)[-1].commit_id
                api.create_branch(url.repo_id, branch=revision, revision=first_commit, exist_ok=True)
            set_location(card, url.repo_id, revision)
            # not upload_folder, which splits a push into several commits
            places = [f"{_RESULTS}/{path.name}" if path.parent.name == _RESULTS else path.name for path in files]
            operations = [*map(CommitOperationAdd, places, files)]
            done = api.create_commit(url.repo_id, operations, commit_message=message, revision=revision)
            if tag:
                api.create_tag(url.repo_id, tag=tag, revision=done.oid)
        except UserError:
            raise
        except Exception as error:  # huggingface_hub, its HTTP client and hf_xet each raise their own types
            hint = "check the name and the network, and log in with `hf auth login`"
            raise UserError(f"cannot push to {repo_id}: {_reason(error)}; {hint}.") from None
    address = f"{url}/tree/{revision}" if revision else str(url)
    return address if said is None else f"{address} as {said}"


def _files_of_folder(folder: Path, repo_id: str, format: str, scratch: Path) -> tuple[Path, list[Path], str | None]:
    """Return the card and all files to upload, and what they are if that was a choice."""
    files = exported_files(folder)  # refuses links before anything reads the files
    from hfgolf.publish.convert import in_format  # late: it imports the architectures

    outgoing, said = in_format(folder, format, scratch / "model", repo_id)
    for names in (("README.md",), ("model.safetensors", _INDEX)):
        if not any((outgoing / name).is_file() for name in names):
            raise UserError(f"{folder} has no {names[0]}, so nothing was pushed; export the model again.")
    # results are of the model in any form
    results = [path for path in files if path.parent != folder]
    files = files if outgoing == folder else [*exported_files(outgoing), *results]
    return outgoing / "README.md", with_current_code(files), said


def _files_of_gguf(file: Path, repo_id: str, base_model: str | None, scratch: Path) -> tuple[Path, list[Path]]:
    """Return the card, written to `scratch`, and all files to upload."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise UserError(f"--model: {file} is not a GGUF file; write one with hfgolf export --to gguf.")
    card = scratch / "README.md"
    card.write_text(gguf_card(file.name, repo_id, base_model), encoding="utf-8")
    return card, [card, file]


def with_current_code(files: list[Path]) -> list[Path]:
    """Return the files to upload, with the modeling code of this installation: an old export's may be outdated."""
    others = [path for path in files if path.suffix != ".py"]
    return others if others == files else [*others, *(_MODEL / name for name in _CODE)]


def set_location(path: Path, location: str, revision: str | None = None) -> None:
    """Set the location in the examples of the card at `path`. revision: the branch; None: main."""
    card = path.read_text(encoding="utf-8")
    place = f'"{location}", revision="{revision}"' if revision else f'"{location}"'
    # only the first ones: a sample from a model trained on Python may contain more
    named = re.sub(r'(?<=\.from_pretrained\()"[^"]*"(, revision="[^"]*")?', lambda _: place, card, count=2)
    named = re.sub(r'(?<=export --model ")[^"]*(?=" --to (?:gguf|native))', lambda _: location, named, count=2)
    if named != card:
        write_text(path, named)


def exported_files(folder: Path) -> list[Path]:
    """Return the files that an export wrote to a folder, sorted. Warns about others.

    Raises UserError for a link, or for an index that is damaged or names parts of the weights that are not there.
    """
    index, parts = folder / _INDEX, set()
    if index.is_file() and not index.is_symlink():
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
            parts = {name for name in named if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} is damaged, so nothing was pushed; export the model again.") from None
        if missing := sorted(name for name in parts if not (folder / name).exists()):
            raise UserError(f"{folder} lacks its weights {missing[0]}, so nothing was pushed; export the model again.")
    names = {*_EXPORTED, *parts}
    results = folder / _RESULTS
    files = sorted(path for path in folder.iterdir() if path.name in names)
    files += [results] if results.is_symlink() else sorted(results.glob("*.yaml"))
    for path in files:
        if path.is_symlink() or not path.is_file():  # a link may point to any private file
            raise UserError(f"{path} is not a file that an export wrote, so nothing was pushed; remove it.")
    others = sorted(path.name for path in set(folder.iterdir()) - {*files, results})
    if others:
        logger.warning("hub: not pushed, because an export does not write it: %s", ", ".join(map(repr, others)))
    return files


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # "Error while uploading FILE"
        error = error.__cause__
    lines = str(error).strip().splitlines()  # the first says what happened, the others link to HTTP documentation
    return one_line(lines[0])[:300] if lines else type(error).__name__


class HubPusher:
    """Push for a run: one push at a time, in a separate process, without ever stopping or delaying the run."""

    def __init__(self, repo_id: str, private: bool, format: str = "auto") -> None:
        self._repo_id, self._private, self._format = repo_id, private, format
        self._running: threading.Thread | None = None
        self.pushed: set[str] = set()
        """The branches that were pushed."""

    def push_later(self, folder: Path, message: str) -> None:
        """Start a push in the background. Renames the folder, so that the next export cannot change it.

        Skips this push if the previous one is still running, so that a slow network does not build a queue.
        """
        if self._running and self._running.is_alive():
            logger.info("hub: the previous push is still running; skipping this one (%s)", message)
            return
        outgoing = folder.with_name(f".pushing-{folder.name}")
        shutil.rmtree(outgoing, ignore_errors=True)
        try:
            folder.rename(outgoing)
        except OSError as error:  # something is left of the folder before, as on a network file system
            self._warn(f"{one_line(error)}.")
            return
        self._start(outgoing, message, delete_after=True)

    def push_branch(self, folder: Path, message: str) -> None:
        """Start a push to the branch named like the folder, after the pushes before it: none is skipped."""
        self._start(folder, message, branch=folder.name)

    def push_now(self, folder: Path, message: str) -> None:
        """Wait for the running pushes, then push and wait for that, each up to its time limit."""
        last = self._start(folder, message)
        try:
            last.join()
        except BaseException:  # a signal; it does not end a process that pushes
            logger.warning("hub: not waiting for the push; to repeat it: %s", self._retry_command(folder))
            raise

    def _start(
        self, folder: Path, message: str, *, delete_after: bool = False, branch: str | None = None
    ) -> threading.Thread:
        before = self._running

        def work() -> None:
            if before:
                before.join()
            self._push(folder, message, delete_after, branch)

        # a daemon thread, so that the end of the run does not wait for it
        self._running = threading.Thread(target=work, daemon=True)
        self._running.start()
        return self._running

    def _push(self, folder: Path, message: str, delete_after: bool, branch: str | None) -> None:
        package = Path(__file__).parents[2]
        environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        try:
            num_bytes = sum(path.stat().st_size for path in folder.iterdir())
            seconds = int(PUSH_TIMEOUT_SECONDS + num_bytes / _SLOW_BYTES_PER_SECOND)
            job = json.dumps([seconds, str(folder), self._repo_id, self._private, message, self._format, branch])
            command = [sys.executable, "-m", "hfgolf.publish.hub", job]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, start_new_session=True
            )
            is_pushed, output = done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr).strip()
        except subprocess.TimeoutExpired:
            is_pushed, output = False, f"it did not finish within {seconds} s."
        except OSError as error:  # the folder is gone, or there is no room for another process
            is_pushed, output = False, f"{one_line(error)}."
        if is_pushed:
            if branch:
                self.pushed = {*self.pushed, branch}
            logger.info("hub: pushed %s to %s", message, output)
        else:
            reason = output.splitlines()[-1].removeprefix("error: ") if output else "its process was killed."
            self._warn(reason, None if delete_after else self._retry_command(folder, branch))
        if delete_after:
            shutil.rmtree(folder, ignore_errors=True)

    def _warn(self, reason: str, retry: str | None = None) -> None:
        """Say why there was no push, and how to repeat it; None: the run will push again."""
        again = "The next push will try again." if retry is None else f"To try again: {retry}"
        logger.warning("hub: not pushed: %s %s", reason, again)

    def _retry_command(self, folder: Path, branch: str | None = None) -> str:
        words = ["--model", str(folder), "--revision", branch] if branch else ["--run", str(folder.parent)]
        words += ["--repo", self._repo_id, *(["--private"] if self._private else [])]
        words += [] if self._format == "auto" else ["--format", self._format]
        return f"{own_command()} push {shlex.join(words)}"


def main() -> None:
    """Push in a separate process, which ends itself in time even if the run is gone."""
    seconds, folder, *arguments = json.loads(sys.argv[1])
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
    print(push_model(Path(folder), *arguments))


if __name__ == "__main__":
    run_command(main)
