"""Chats as Telegram, Discord, Messenger, Instagram and ChatGPT export them: text with its speakers, or messages.

Knows an export by its keys alone. Does not know files, nor which column is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

READS = "Telegram with left_chats, Discord, Messenger"
"""What a change to in this module makes other text of the same files."""


def chats_as_text(value: dict[str, Any]) -> list[str]:
    """Return the chats in what Telegram Desktop, DiscordChatExporter or Meta wrote, each as lines NAME: TEXT; else [].

    Messages without text, such as pictures and calls, are no part of it.
    """
    wrapped = [value[name] for name in ("chats", "left_chats") if isinstance(value.get(name), dict)]
    try:
        chats: list[Any] = [chat for one in wrapped for chat in one["list"]] if wrapped else [value]
        lines = [[*filter(None, map(_line, _in_order(chat["messages"])))] for chat in chats]
    except (LookupError, TypeError, ValueError):
        return []
    return ["\n".join(found) for found in lines if found]


def mended(value: dict[str, Any]) -> dict[str, Any]:
    """Return a chat of Messenger or Instagram with its own characters: Meta writes each byte of their UTF-8 as one."""
    match value:
        case {"participants": list(), "messages": [{"sender_name": str(), "timestamp_ms": int()}, *_]}:
            with suppress(ValueError):  # one string that no bytes of UTF-8 make: somebody has mended it
                return dict(json.loads(json.dumps(value, ensure_ascii=False).encode("latin-1").decode()))
    return value


def _in_order(messages: list[Any]) -> list[Any]:
    """Return messages in the order of their time, in which all but Meta write them; Meta's begin with the last."""
    is_metas = all(isinstance(message, dict) and "timestamp_ms" in message for message in messages)
    return sorted(messages[::-1], key=lambda message: message["timestamp_ms"]) if is_metas else messages


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
        case {"sender_name": str(speaker), "timestamp_ms": int(), "content": str(text)}:
            pass
        case {"sender_name": str(), "timestamp_ms": int(), **others} if "content" not in others:
            return ""
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
