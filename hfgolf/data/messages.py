"""Rows of messages: OpenAI's {"role", "content", "weight"} and ShareGPT's {"from", "value", "weight"}.

Owns what a row may hold. What it does not know, it refuses. Does not know templates or tokens.
"""

from __future__ import annotations

from typing import Any

from hfgolf.system.wording import join_words, shortened

Messages = list[dict[str, Any]]
"""A conversation: [{"role": str, "content": str}, ...], with "weight": 0 in a turn that the loss leaves out."""
_ROLES = {
    **{role: role for role in ("system", "user", "assistant")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
}
_ABSENT: tuple[object, ...] = (None, "", [], {})
"""Values of fields that a table has because other rows fill them."""


def read_messages(row: list[Any]) -> Messages:
    """Return the messages of a row. Raises ValueError, with the reason, if it holds anything else."""
    return [_read_message(number, message) for number, message in enumerate(row)]


def is_learned(message: dict[str, Any]) -> bool:
    """Return whether the loss counts a message."""
    return message["role"] == "assistant" and "weight" not in message


def require_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair, which JSON can spell and no encoding of Unicode can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds half of a surrogate pair ({shortened(text[error.start])} at character {error.start}), which is no"
            " character; write it again from its source"
        ) from None


def _read_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"holds {type(message).__name__} as message {number}, not role and content")
    role_key, content_key = ("role", "content") if message.get("role") is not None else ("from", "value")
    role, content = message.get(role_key), message.get(content_key)
    if not isinstance(role, str) or not role:
        raise ValueError(f"has message {number} without a role (or from)")
    if role not in _ROLES:
        raise ValueError(f"has {role_key} {shortened(role)} in message {number}; allowed: {join_words(_ROLES)}")
    for key, value in message.items():
        if key not in (role_key, content_key, "weight") and value not in _ABSENT:
            raise ValueError(
                f"has {shortened(key)} in message {number}, which cannot be trained on; leave it or such rows out"
            )
    if not isinstance(content, str):
        raise ValueError(f"has {type(content).__name__} as {content_key} of message {number}, not text")
    require_unicode(content)
    read = {"role": _ROLES[role], "content": content}
    weight = message.get("weight")
    if weight is None:
        return read
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise ValueError(f"has weight {shortened(weight)} in message {number}; allowed: 0 and 1")
    if weight == 1 and read["role"] != "assistant":
        raise ValueError(f"has weight 1 in message {number} of {role}; only the assistant's turns can be trained on")
    return read if weight == 1 or read["role"] != "assistant" else read | {"weight": 0}
