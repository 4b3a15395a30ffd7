"""Chats as the apps export them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hfgolf.system.errors import UserError

TELEGRAM: dict[str, Any] = {
    "name": "Ada",
    "type": "personal_chat",
    "id": 1,
    "messages": [
        {"id": 1, "type": "service", "date": "2025-01-01T10:00:00", "actor": "Ada", "action": "pin", "text": ""},
        {"id": 2, "type": "message", "date": "2025-01-01T10:01:00", "from": "Ada", "text": "Hello,\nBob"},
        {"id": 3, "type": "message", "date": "2025-01-01T10:02:00", "from": "Bob", "photo": "1.jpg", "text": ""},
        {
            "id": 4,
            "type": "message",
            "date": "2025-01-01T10:03:00",
            "from": None,
            "text": ["see ", {"type": "link", "text": "https://example.org"}, "!"],
        },
    ],
}
TELEGRAM_TEXT = "Ada: Hello,\nBob\nDeleted Account: see https://example.org!"


def said(number: int, text: str, **changes: object) -> dict[str, object]:
    start = {"id": str(number), "type": "Default", "timestamp": "2025-01-01T10:00:00+00:00", "content": text}
    return start | {"author": {"id": "5", "name": "ada", "isBot": False}, "attachments": []} | changes


DISCORD = {
    "guild": {"id": "1", "name": "g"},
    "channel": {"id": "2", "name": "c"},
    "messages": [said(1, "one"), said(2, ""), said(3, "Joined.", type="GuildMemberJoin"), said(4, "two", type="Reply")],
    "messageCount": 4,
}


METAS = {
    "participants": [{"name": "Jos\u00c3\u00a9"}, {"name": "Ada"}],
    "messages": [
        {"sender_name": "Jos\u00c3\u00a9", "timestamp_ms": 3, "content": "\u00f0\u009f\u0098\u0080 you?"},
        {"sender_name": "Ada", "timestamp_ms": 2, "photos": [{"uri": "1.jpg"}]},
        {"sender_name": "Ada", "timestamp_ms": 1, "content": "Hi"},
    ],
    "title": "Jos\u00c3\u00a9",
}


@pytest.fixture
def documents(write, contents):
    """Return a function that returns the documents in what an app exports."""
    return lambda value, **settings: contents(write("a.json", json.dumps(value, indent=1)), **settings)


@pytest.mark.parametrize(
    ("export", "texts"),
    [
        (TELEGRAM, [TELEGRAM_TEXT]),
        ({"about": "a", "chats": {"about": "b", "list": [TELEGRAM, {"messages": []}, TELEGRAM]}}, [TELEGRAM_TEXT] * 2),
        ({"chats": {"list": [TELEGRAM]}, "left_chats": {"list": [TELEGRAM]}}, [TELEGRAM_TEXT] * 2),
        ({"left_chats": {"list": [TELEGRAM]}}, [TELEGRAM_TEXT]),
        (DISCORD, ["ada: one\nada: two"]),
        (METAS, ["Ada: Hi\nJosé: 😀 you?"]),
    ],
)
def test_chat_of_an_export_is_one_document_with_its_speakers(documents, export, texts):
    assert documents(export) == texts


def test_only_what_an_app_writes_is_its_export(documents):
    rows = [message | {"id": str(message["id"]), "text": "one"} for message in TELEGRAM["messages"]]
    assert documents({"messages": rows}) == ["one"] * 4
    assert documents(DISCORD, text_column="content") == ["one", "Joined.", "two"]


def test_characters_of_messenger_are_mended_only_if_all_of_them_are_bytes(documents):
    assert documents(METAS, text_column="content") == ["😀 you?", "Hi"]
    assert documents(METAS | {"title": "José"}, text_column="content") == ["ð\x9f\x98\x80 you?", "Hi"]
    assert documents({"messages": METAS["messages"]}, text_column="content")[1] == "Hi"


def node(parent: str | None, role: str = "", *parts: object, **changes: object) -> dict[str, object]:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [*parts]}, "recipient": "all"}
    return {"parent": parent, "message": message | changes if role else None}


MAPPING = {
    "root": node(None),
    "system": node("root", "system", ""),
    "profile": node("system", "user", "I am Ada.", metadata={"is_visually_hidden_from_conversation": True}),
    "question": node("profile", "user", "How many?"),
    "older": node("question", "assistant", "Two."),
    "think": node("question", "assistant", content={"content_type": "thoughts", "thoughts": []}),
    "first": node("think", "assistant", "I ", "count."),
    "call": node("first", "assistant", "count()", recipient="python"),
    "tool": node("call", "tool", "3"),
    "second": node("tool", "assistant", "Three."),
}


def test_messages_of_chatgpt_are_the_branch_that_it_shows(documents):
    asked = {"role": "user", "content": "How many?"}
    for node_, answer in (("second", "I count.\n\nThree."), ("older", "Two.")):
        export = [{"title": "a", "mapping": MAPPING, "current_node": node_}]
        assert documents(export, messages_column="mapping") == [[asked, {"role": "assistant", "content": answer}]]
    picture = node("second", "user", {"asset_pointer": "a"}, content={"content_type": "multimodal_text", "parts": []})
    export = [{"mapping": MAPPING | {"picture": picture}, "current_node": "picture"}]
    with pytest.raises(UserError, match="no row with a list of messages in column 'mapping'"):
        documents(export, messages_column="mapping")
    with pytest.raises(UserError, match=r"; or data\.messages_column to mapping\."):
        documents(export)


@pytest.mark.parametrize("last", ["lost", "a", 7])
def test_tree_that_is_not_chatgpts_is_one_line(documents, last):
    circle = {"a": node("b", "user", "one"), "b": node("a", "assistant", "two")}
    line = r"row 0 \(line 2\): 'mapping' does not lead from current_node to a first message, as in ChatGPT's export\.$"
    with pytest.raises(UserError, match=line):
        documents([{"mapping": circle, "current_node": last}], messages_column="mapping")
