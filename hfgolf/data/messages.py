"""Rows of messages: OpenAI's {"role", "content"} and ShareGPT's {"from", "value"}.

Owns what a row may hold. Does not know templates or tokens.
"""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, str]]
"""A conversation: [{"role": str, "content": str}, ...]."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def read_messages(row: Any) -> Messages:
    """Return the messages of a row. Raises ValueError, with the reason, if it is no list of messages."""
    if not isinstance(row, list):
        raise ValueError(f"holds {type(row).__name__}, not a list of messages")
    return [_read_message(number, message) for number, message in enumerate(row)]


def _read_message(number: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"holds {type(message).__name__} as message {number}, not role and content")
    role_key, content_key = ("role", "content") if message.get("role") is not None else ("from", "value")
    role, content = message.get(role_key), message.get(content_key)
    if not isinstance(role, str) or not role:
        raise ValueError(f"has message {number} without a role (or from)")
    if not isinstance(content, str):
        raise ValueError(f"has {type(content).__name__} as {content_key} of message {number}, not text")
    if message.get("tool_calls"):
        raise ValueError(f"has tool_calls in message {number}, which cannot be trained on; leave such rows out")
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": content}
