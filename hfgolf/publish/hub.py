"""Pushing an exported model to the Hub; from a run a failure is a warning, from a script it is an error.

Owns the upload. A run pushes in a process of its own, which nothing waits for without a limit: neither the training,
nor a signal, nor the end. Does not know what is in the folder, except for what an export writes.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from hfgolf.command_line import one_line, run_command
from hfgolf.errors import UserError
from hfgolf.publish.model_card import name_in_card

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 60  # huggingface_hub itself would wait for an answer for ever
_PUSH_SECONDS = 300  # all of a push, and on top of it the time that a slow line takes for the files
_SLOW_BYTES_PER_SECOND = 500_000

# What an export writes, whatever the tokenizer; nothing else leaves the machine.
_EXPORTED = (
    *("README.md", "loss.png", "config.json", "generation_config.json"),
    *("model*.safetensors", "model.safetensors.index.json"),
    *("configuration_golf.py", "modeling_golf.py", "causal_blocks.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)


def push_folder(folder: Path, repo_id: str, private: bool, message: str) -> str:
    """Create the repository if it is missing, upload what an export wrote in one commit, return the repository's URL.

    The card in the folder is told the name first. HF_ENDPOINT and the token are huggingface_hub's. Raises UserError if
    the Hub can't be reached, refuses or doesn't answer, if `private` is asked of a repository that is public already,
    and if a file is a link.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import get_session

    files = exported_files(folder)
    api = HfApi()
    get_session().timeout = _ANSWER_SECONDS
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: as the account has it
        if private and not api.model_info(url.repo_id).private:
            raise UserError(f"hub.private: {repo_id} is a public repository already; make it private, or name another.")
        name_in_card(folder / "README.md", url.repo_id)
        # not upload_folder, which makes several commits of one push
        operations = [CommitOperationAdd(path.name, path) for path in files]
        api.create_commit(url.repo_id, operations, commit_message=message)
    except UserError:
        raise
    except Exception as error:  # huggingface_hub, its HTTP client and hf_xet have their own, and some are RuntimeErrors
        hint = "check the name and the network, and log in with `hf auth login`"
        raise UserError(f"hub.repo_id: cannot push to {repo_id}: {_reason(error)}; {hint}.") from None
    return str(url)


def exported_files(folder: Path) -> list[Path]:
    """Return what an export wrote into a folder, by name; says what else is there. Raises UserError for a link."""
    files = sorted(path for path in folder.iterdir() if any(path.match(pattern) for pattern in _EXPORTED))
    for path in files:
        if path.is_symlink() or not path.is_file():  # what it points to may be anything
            raise UserError(f"{path} is not a file that an export wrote; nothing is pushed. Remove it.")
    others = sorted(path.name for path in set(folder.iterdir()) - set(files))
    if others:
        logger.warning("hub: not pushed, because no export writes it: %s", ", ".join(map(repr, others)))
    return files


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # "Error while uploading FILE"
        error = error.__cause__
    lines = str(error).strip().splitlines()  # the first says what happened, the others where to read about HTTP
    return one_line(lines[0])[:300] if lines else type(error).__name__


class HubPusher:
    """Pushes for a run: one push at a time, in a process of its own, and never stops the run or holds it up.

    repo_id: None pushes nothing.
    """

    def __init__(self, repo_id: str | None, private: bool) -> None:
        self._repo_id, self._private = repo_id, private
        self._running: threading.Thread | None = None

    def push_later(self, folder: Path, message: str) -> None:
        """Start a push, which takes the folder away, so that the next export cannot disturb it.

        Skipped while the one before is under way, so that slow networks do not pile them up.
        """
        if self._running and self._running.is_alive():
            logger.info("hub: the push before is still under way, this one (%s) is skipped", message)
            return
        outgoing = folder.with_name(f".pushing-{folder.name}")
        shutil.rmtree(outgoing, ignore_errors=True)
        self._start(folder.rename(outgoing), message, is_outgoing=True)

    def push_now(self, folder: Path, message: str) -> None:
        """Wait for what is under way, then push and wait for that, not longer than a slow line takes."""
        if self._running:
            self._running.join()
        self._start(folder, message, is_outgoing=False)
        try:
            if self._running:
                self._running.join()
        except BaseException:  # a signal; the process that pushes is not ended by it
            logger.warning("hub: the push goes on in the background; to repeat it: %s", self._again(folder))
            raise

    def _start(self, folder: Path, message: str, is_outgoing: bool) -> None:
        if self._repo_id is None:
            return
        # a daemon: the end of the run does not wait for it
        self._running = threading.Thread(target=self._push, args=(folder, message, is_outgoing), daemon=True)
        self._running.start()

    def _push(self, folder: Path, message: str, is_outgoing: bool) -> None:
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        seconds = int(_PUSH_SECONDS + num_bytes / _SLOW_BYTES_PER_SECOND)
        options = [f"--seconds={seconds}", f"--message={message}", *["--private"] * self._private]
        command = [sys.executable, "-m", "hfgolf.publish.hub", str(folder), str(self._repo_id), *options]
        package = Path(__file__).parents[2]
        environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, start_new_session=True
            )
            is_pushed, told = done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr).strip()
        except subprocess.TimeoutExpired:
            is_pushed, told = False, f"no end within {seconds} s."
        if is_pushed:
            logger.info("hub: pushed %s to %s", message, told)
        else:
            reason = told.splitlines()[-1].removeprefix("error: ") if told else "its process was ended."
            logger.warning("hub: not pushed: %s To try again: %s", reason, self._again(folder))
        if is_outgoing:
            shutil.rmtree(folder, ignore_errors=True)

    def _again(self, folder: Path) -> str:
        return f"python scripts/push_to_hub.py --run {folder.parent} --repo {self._repo_id}"


def main() -> None:
    """Push as a run's own process, which ends in time even if the run is not there any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("repo_id")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--message", required=True)
    parser.add_argument("--seconds", type=int, required=True)
    arguments = parser.parse_args()
    if hasattr(signal, "alarm"):
        signal.alarm(arguments.seconds)
    print(push_folder(arguments.folder, arguments.repo_id, arguments.private, arguments.message))


if __name__ == "__main__":
    run_command(main)
