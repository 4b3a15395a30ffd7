"""The network: copies of what is named by URL, and whether the Hub answers. Does not know what the files hold.

A URL is downloaded once, and a glob of URLs listed once; later starts need no network. fsspec reads all protocols but
http, for which it needs aiohttp, which nothing else here installs.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import re
import shutil
import string
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hfgolf.data.cache_folder import locked
from hfgolf.system.durable import replace_file, write_text
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact
from hfgolf.system.wording import first_line

_TIMEOUT_SECONDS = 60  # without a byte


def is_http(url: str) -> bool:
    return re.match(r"https?://", url) is not None


def list_urls(pattern: str, key: str, folder: Path) -> list[str]:
    """Return the URLs that a URL or a glob of URLs stands for, as fsspec lists them.

    The answer of a glob is kept beside the downloads, so that a later start needs no network.
    """
    if is_http(pattern) or not glob.has_magic(pattern):
        return [pattern]
    listing = _download_folder(pattern, folder) / "listing.json"
    with suppress(OSError, ValueError, RecursionError):  # absent, or damaged: made again
        urls = json.loads(listing.read_bytes())
        if urls and isinstance(urls, list) and all(isinstance(url, str) for url in urls):
            return urls
    files, path = _file_system(pattern, key)
    try:
        matches = [path] if files.isfile(path) else filter(files.isfile, files.glob(path))  # literal first
        urls = sorted(map(files.unstrip_protocol, matches))
    except Exception as error:  # each file system has its own exceptions
        raise UserError(f"{key}: cannot list {redact(pattern)} ({first_line(error)}).") from error
    if not urls:
        raise UserError(f"{key}: no file matches {redact(pattern)}; check the address.")
    listing.parent.mkdir(parents=True, exist_ok=True)
    write_text(listing, json.dumps(urls))
    return urls


def _file_system(url: str, key: str) -> tuple[Any, str]:
    """Return (fsspec's file system, path in it) of a URL such as hf://datasets/name/file or s3://bucket/file."""
    import fsspec

    try:
        return cast(tuple[Any, str], fsspec.url_to_fs(url))
    except (ImportError, ValueError) as error:  # a package is missing ("Install s3fs to ..."), or an unknown protocol
        raise UserError(f"{key}: cannot open {redact(url)}: {first_line(error)}.") from error


def _download_folder(url: str, folder: Path) -> Path:
    return folder / hashlib.sha256(url.encode()).hexdigest()[:16]


def download(url: str, key: str, folder: Path) -> Path:
    """Return the copy of `url` in `folder`, downloading it if it is missing. Delete it to download it again."""
    name = Path(re.split("[?#]", url, maxsplit=1)[0]).name or "text"  # of the path, or else the host
    path = _download_folder(url, folder) / name
    if path.exists():
        return path
    unfinished = path.with_name(f".partial-{name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / "download.lock", f"downloads {redact(url)}"):
            if not path.exists():  # another process may have downloaded it while this one waited
                try:
                    (_fetch if is_http(url) else _copy)(url, key, unfinished)
                    replace_file(unfinished, path)
                finally:
                    for leftover in (unfinished, *path.parent.glob(f"{glob.escape(name)}.*.part")):
                        leftover.unlink(missing_ok=True)
    except UserError:
        raise
    except Exception as error:  # each file system of fsspec has its own exceptions
        raise UserError(
            f"{key}: cannot download {redact(url)} to {path.parent} ({first_line(error)}); check the address, the"
            " network and the disk."
        ) from error
    return path


def _copy(url: str, key: str, path: Path) -> None:
    """Download a URL that fsspec knows to a file. Raises OSError if the download is cut short."""
    files, remote = _file_system(url, key)
    if files.isdir(remote):
        raise UserError(f"{key}: {redact(url)} is a folder; name its files by a glob, such as {redact(url)}/*.jsonl.")
    files.get_file(remote, str(path))
    size = files.info(remote).get("size")
    if size is not None and size != path.stat().st_size:
        raise OSError(f"{path.stat().st_size:,} of {size:,} bytes arrived")


def _fetch(url: str, key: str, path: Path) -> None:
    """Download `url` to a file. Raises OSError if the download is cut short or stalls."""
    encoded = urllib.parse.quote(url, safe=string.punctuation)  # what browsers show as spaces and letters
    with urllib.request.urlopen(encoded, timeout=_TIMEOUT_SECONDS) as answer, open(path, "wb") as file:
        if answer.headers.get_content_type() == "text/html" and path.suffix.lower() not in (".html", ".htm"):
            raise UserError(
                f"{key}: {redact(url)} is a web page, not a file; give the address of the file itself, such as that of"
                " GitHub's Raw button, or save the page, and name its .html file."
            )
        shutil.copyfileobj(answer, file)
        if answer.length:  # http.client does not raise for this
            raise OSError(f"the connection ended {answer.length:,} bytes before the end of the file")


@functools.cache
def is_cached_only(name: str, file: str = "config.json") -> bool:
    """Return whether the Hub does not answer, but a file of a repository is in the cache; False for a folder.

    Asks only once: transformers asks for each file of a repository, for 25 seconds each. Raises the error of the
    request if the file is not in the cache, either.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if Path(name).is_dir():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except Exception as error:  # of httpx, or of a proxy
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return False  # it answers, and transformers says what is wrong
        if not isinstance(try_to_load_from_cache(name, file), str):
            raise
        return True
    return False
