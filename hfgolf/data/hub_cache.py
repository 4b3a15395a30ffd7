"""Whether the Hub answers, asked once. transformers asks for each file of a repository, for 25 seconds each.

Does not know what the files are for.
"""

from __future__ import annotations

import functools
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError


@functools.cache
def is_cached_only(name: str, file: str = "config.json") -> bool:
    """Return whether the Hub does not answer, but a file of a repository is in the cache; False for a folder.

    Raises the error of the request if it is not in the cache, either.
    """
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
