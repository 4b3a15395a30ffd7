"""Pushing an exported model to the Hub; from a run a failure is a warning, from a script it is an error.

Owns the upload. Does not know what is in the folder, except that its card says where to load it from.
"""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hfgolf.command_line import one_line
from hfgolf.errors import UserError
from hfgolf.publish.model_card import name_in_card

logger = logging.getLogger(__name__)


def push_folder(folder: Path, repo_id: str, private: bool, message: str) -> str:
    """Create the repository where it is missing, upload the folder's files in one commit, return its URL.

    The card in the folder is told the name first. HF_ENDPOINT and the token are huggingface_hub's. Raises UserError
    where the Hub cannot be reached or refuses, and where `private` is asked of a repository that is public already.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: as the account has it
        if private and not api.model_info(url.repo_id).private:
            raise UserError(f"hub.private: {repo_id} is a public repository already; make it private, or name another.")
        name_in_card(folder / "README.md", url.repo_id)
        # not upload_folder, which makes several commits of one push
        files = [CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir()) if path.is_file()]
        api.create_commit(url.repo_id, files, commit_message=message)
    except UserError:
        raise
    except Exception as error:  # huggingface_hub, its HTTP client and hf_xet have their own, and some are RuntimeErrors
        hint = "check the name and the network, and log in with `hf auth login`"
        raise UserError(f"hub.repo_id: cannot push to {repo_id}: {_reason(error)}; {hint}.") from None
    return str(url)


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # "Error while uploading FILE"
        error = error.__cause__
    lines = str(error).strip().splitlines()  # the first says what happened, the others where to read about HTTP
    return one_line(lines[0])[:300] if lines else type(error).__name__


class HubPusher:
    """Pushes for a run: one push at a time, in the background or at the end, and never stops the run.

    repo_id: None pushes nothing.
    """

    def __init__(self, repo_id: str | None, private: bool) -> None:
        self._repo_id, self._private = repo_id, private
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub")
        self._running: Future[None] | None = None

    def push_later(self, folder: Path, message: str) -> None:
        """Start a push, which takes the folder away, so that the next export cannot disturb it.

        Skipped while the one before is under way, so that slow networks do not pile them up.
        """
        if self._running and not self._running.done():
            logger.info("hub: the push before is still under way, this one (%s) is skipped", message)
            return
        outgoing = folder.with_name(f".pushing-{folder.name}")
        shutil.rmtree(outgoing, ignore_errors=True)
        self._running = self._worker.submit(self._push_away, folder.rename(outgoing), message)

    def push_now(self, folder: Path, message: str) -> None:
        """Wait for what is under way, then push."""
        self._worker.submit(self._push, folder, message).result()

    def _push_away(self, folder: Path, message: str) -> None:
        self._push(folder, message)
        shutil.rmtree(folder, ignore_errors=True)

    def _push(self, folder: Path, message: str) -> None:
        if self._repo_id is None:
            return
        try:
            logger.info("hub: pushed %s to %s", message, push_folder(folder, self._repo_id, self._private, message))
        except UserError as error:
            again = f"python scripts/push_to_hub.py --run {folder.parent} --repo {self._repo_id}"
            logger.warning("hub: not pushed: %s To try again: %s", error, again)
