"""Pushing an exported model to the Hub; from a run a failure is a warning, from a script it is an error."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hfgolf.command_line import one_line
from hfgolf.errors import UserError

logger = logging.getLogger(__name__)


def push_folder(folder: Path, repo_id: str, private: bool, message: str) -> str:
    """Create the repository where it is missing, upload the folder's files in one commit, return its URL.

    HF_ENDPOINT and the token are huggingface_hub's. Raises UserError where the Hub cannot be reached or refuses.
    """
    import httpx2  # huggingface_hub's client, whose network errors it does not wrap
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, allow_patterns=names, commit_message=message)
    except (HfHubHTTPError, HFValidationError, httpx2.HTTPError, OSError, ValueError) as error:
        hint = "check the name and the network, and log in with `hf auth login`"
        raise UserError(f"hub.repo_id: cannot push to {repo_id}: {one_line(error)[:200]}; {hint}.") from None
    return str(url)


class HubPusher:
    """Pushes for a run: one push at a time, in the background or at the end, and never stops the run.

    repo_id: None pushes nothing.
    """

    def __init__(self, repo_id: str | None, private: bool) -> None:
        self._repo_id, self._private = repo_id, private
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub")
        self._running: Future[None] | None = None

    def push_later(self, folder: Path, message: str) -> None:
        """Start a push; skipped while the one before is under way, so that slow networks do not pile them up."""
        if self._running and not self._running.done():
            logger.info("hub: the push before is still under way, this one (%s) is skipped", message)
            return
        self._running = self._worker.submit(self._push, folder, message)

    def push_now(self, folder: Path, message: str) -> None:
        """Wait for what is under way, then push."""
        self._worker.submit(self._push, folder, message).result()

    def _push(self, folder: Path, message: str) -> None:
        if self._repo_id is None:
            return
        try:
            logger.info("hub: pushed %s to %s", message, push_folder(folder, self._repo_id, self._private, message))
        except UserError as error:
            again = f"python scripts/push_to_hub.py --run {folder.parent} --repo {self._repo_id}"
            logger.warning("hub: not pushed: %s To try again: %s", error, again)
