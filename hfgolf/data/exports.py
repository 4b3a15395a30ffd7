"""Chats as Telegram, Discord and ChatGPT export them: text with its speakers, or messages.

Knows an export by its keys alone. Does not know files, nor which column is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def chats_as_text(value: dict[str, Any]) -> list[str]:
    """Return the chats in what Telegram Desktop or DiscordChatExporter wrote, each as lines NAME: TEXT; else [].

    Messages without text, such as pictures and calls, are no part of it.
    """
    wrapped = value.get("chats")
    chats: Any = wrapped.get("list") if isinstance(wrapped, dict) else [value]
    try:
        lines = [[*filter(None, map(_line, chat["messages"]))] for chat in chats]
    except (LookupError, TypeError, ValueError):
        return []
    return ["\n".join(found) for found in lines if found]


def _line(message: Any) -> str:
    """Return a message with its speaker; "" without text. Raises ValueError if it is of neither program."""
    match message:
        case {"id": int(), "date": str(), "type": "message", "from": speaker, "text": str() | list() as parts}:
            text = "".join(part if isinstance(part, str) else part["text"] for part in parts)
            speaker = speaker or "Deleted Account"
        case {"id": int(), "date": str(), "type": "service" | "unsupported"}:
            return ""
        case {"id": str(), "timestamp": str(), "type": str(kind), "author": {"name": speaker}, "content": str(text)}:
            text = text if kind in ("Default", "Reply") else ""
        case _:
            raise ValueError
    return f"{speaker}: {text}" if text else ""


def current_branch(conversation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the user and ChatGPT say in a conversation as it is shown last, of its columns mapping, current_node.

    Thoughts, tools and what is said to them are left out; a conversation with pictures or sounds is [].
    Raises ValueError if the columns are not ChatGPT's.
    """
    messages: list[dict[str, Any]] = []
    try:
        nodes, place = dict(conversation["mapping"]), conversation["current_node"]
        while place is not None:
            node = nodes.pop(place)  # no node comes twice
            place = node["parent"]
            match node["message"]:
                case {"content": {"content_type": "multimodal_text"}}:
                    return []
                case {"metadata": {"is_visually_hidden_from_conversation": True}}:
                    continue
                case {
                    "author": {"role": "user" | "assistant" as role},
                    "content": {"content_type": "text", "parts": parts},
                    **rest,
                } if (text := "".join(parts)) and rest.get("recipient", "all") == "all":
                    if messages and messages[-1]["role"] == role:
                        messages[-1]["content"] = f"{text}\n\n{messages[-1]['content']}"
                    else:
                        messages.append({"role": role, "content": text})
    except (LookupError, TypeError, ValueError):
        raise ValueError("does not lead from current_node to a first message, as in ChatGPT's export") from None
    return messages[::-1]
