"""Conversations become the tokens of the tokenizer's chat template, and the loss counts what the assistant writes."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tiny_export import build_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.cache_folder import read_manifest
from hfgolf.data.chat import CHAT_TEMPLATE, CHAT_TOKENS, ConversationEncoder, add_chat_template, stop_ids
from hfgolf.data.corpus import load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.publish.export import supporting_files
from hfgolf.system.errors import UserError

BYTE = TokenizerSection(kind="byte")
END_OF_TEXT, SYSTEM, USER, ASSISTANT, END = range(256, 261)
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{{- '' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
FIELDS_REFUSED = {"name": "Ann", "tool_calls": [{}], "train": False, "value": "c"}
UNTAGGED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = [
    [message("user", "What is 3 + 4?"), message("assistant", "7")],
    [
        message("system", "Be brief."),
        message("user", "Naïve €?"),
        message("assistant", "Oui: “été” 🌍"),
        message("user", "  indented\n\nlines \n"),
        message("assistant", "\n\n  too "),
    ],
    [message("assistant", "I begin."), message("user", "No"), message("assistant", "")],
]


def write_rows(folder: Path, rows: list[Any], name: str = "train.jsonl") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name.endswith("parquet"):
        Dataset.from_dict({"messages": rows}).to_parquet(path)
    else:
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tokens_of(
    tmp_path: Path, rows: list[Any], tokenizer: TokenizerSection = BYTE, name: str = "train.jsonl"
) -> TokenCache:
    """Return the tokens of the rows, which are both parts of the corpus: its first row is for validation, too."""
    files, val_files = (write_rows(tmp_path / part, rows, name) for part in ("rows", "val"))
    return load_tokens(section([files], tmp_path / "cache", val_files=[val_files]), tokenizer)


def section(files: list[str], cache: Path, **settings: Any) -> DataSection:
    return DataSection(source="files", files=files, messages_column="messages", cache_dir=str(cache), **settings)


def pretrained(folder: Path) -> TokenizerSection:
    return TokenizerSection(kind="pretrained", name_or_path=str(folder))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer as it is exported: an appended special token is one token."""
    tokenizer = find_tokenizer(BYTE, {"messages_column": "messages"}, Path("unused"))
    assert tokenizer is not None
    tokenizer.split_special_tokens = False
    return tokenizer


def chatml_tokenizer(template: str = UNTAGGED) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer in which a line break joins with the text around it, and ChatML's tokens."""
    vocabulary = {symbol: number for number, symbol in enumerate([*bytes_to_unicode().values(), "ĊĊ", "ĊĠ", "ĠĠ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("Ċ", "Ġ"), ("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Return one like Llama 2's, which puts a space in front of a text, with ChatML's tokens."""
    symbols = ["▁", *map(chr, range(32, 127)), "\n", "ï", "€", "“", "”", "é", "🌍"]
    vocabulary = [(symbol, -float(number)) for number, symbol in enumerate(["<unk>", *symbols, "▁I", "▁What"])]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = UNTAGGED
    return tokenizer


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_assistant_turns_and_their_ends_are_the_targets(tmp_path, name):
    stream = tokens_of(tmp_path, CONVERSATIONS[:2], name=name).train
    first = [END_OF_TEXT, USER, *b"What is 3 + 4?", END, ASSISTANT, *b"7", END]
    assert stream.tokens[: len(first)].tolist() == first
    assert stream.is_target[: len(first)].tolist() == [0] * (len(first) - 2) + [1, 1]
    second = stream.tokens[len(first) :]
    answers = ["Oui: “été” 🌍".encode(), b"\n\n  too "]
    assert second[stream.is_target[len(first) :] == 1].tolist() == [*answers[0], END, *answers[1], END]
    assert second[:3].tolist() == [END_OF_TEXT, SYSTEM, ord("B")]
    assert stream.piece_tokens.tolist() == [len(first), len(second)]
    assert stream.piece_bytes.tolist() == [1, len(answers[0]) + len(answers[1])]


@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("build", [byte_tokenizer, chatml_tokenizer, spaced_tokenizer])
def test_ids_and_mask_are_those_of_transformers(build, conversation):
    """With {% generation %} in the template and without: transformers needs it."""
    tokenizer, messages = build(), CONVERSATIONS[conversation]
    (part,) = ConversationEncoder(tokenizer).encode([("a", messages)])
    tagged = copy.deepcopy(tokenizer)
    tagged.chat_template = tokenizer.chat_template if build is byte_tokenizer else CHATML
    theirs = tagged.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = theirs["input_ids"], theirs["assistant_masks"]
    if ids[0] != tokenizer.eos_token_id:
        ids, mask = [tokenizer.eos_token_id, *ids], [0, *mask]
    assert part.ids == ids
    assert part.is_target.astype(int).tolist() == mask and sum(mask)
    (again,) = ConversationEncoder(tagged).encode([("a", messages)])
    assert again.is_target.tolist() == part.is_target.tolist() and again.num_bytes == part.num_bytes
    answers = "".join(message["content"] for message in messages if message["role"] == "assistant")
    assert part.num_bytes == len(answers.encode())


@pytest.mark.parametrize("build", [byte_tokenizer, chatml_tokenizer, spaced_tokenizer])
def test_prompt_is_where_the_answer_begins(build):
    tokenizer, messages = build(), CONVERSATIONS[0]
    prompt = ConversationEncoder(tokenizer).encode_prompt(messages[:1])
    assert prompt == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    (part,) = ConversationEncoder(tokenizer).encode([("a", messages)])
    begins = prompt if prompt[0] == tokenizer.eos_token_id else [tokenizer.eos_token_id, *prompt]
    assert part.ids[: part.is_target.argmax()] == begins


@pytest.mark.parametrize("build", [byte_tokenizer, chatml_tokenizer])
def test_text_that_spells_a_special_token_stays_text(build):
    tokenizer = build()
    end = tokenizer.convert_tokens_to_ids({byte_tokenizer: "<|end|>", chatml_tokenizer: "<|im_end|>"}[build])
    spelled = f"a{tokenizer.convert_ids_to_tokens(end)}b<|endoftext|>"
    messages = [message("user", spelled), message("assistant", spelled)]
    (part,) = ConversationEncoder(tokenizer).encode([("a", messages)])
    assert part.ids.count(end) == 2 and part.ids.count(tokenizer.eos_token_id) == 1
    answer = np.array(part.ids)[part.is_target]
    assert tokenizer.decode(answer[:-1]) == spelled and answer[-1] == end
    assert part.num_bytes == len(spelled)


def test_a_special_token_of_one_character_counts_as_its_text():
    tokenizer = chatml_tokenizer()
    tokenizer.pad_token = "!"
    (part,) = ConversationEncoder(tokenizer).encode([("a", [message("user", "Oh!"), message("assistant", "A!b!")])])
    assert part.num_bytes == 4 and tokenizer.decode(np.array(part.ids)[part.is_target]) == "A!b!<|im_end|>"


ASKED = [message("system", "Be brief."), message("user", "Add 3 to 4.\n\nAt once."), message("assistant", "7")]
PLAIN = {"system": "Be brief.", "prompt": "Add 3 to 4.\n\nAt once.", "completion": "7"}
ANSWERED = [message("user", "a\n\nb"), message("assistant", "c")]
RECALLED = [message("user", "a"), message("assistant", "b") | {"weight": 0}, *ASKED[1:]]
INSTRUCTION = {"instruction": "Add 3 to 4.", "input": "At once.", "output": "7", "history": None}


@pytest.mark.parametrize(
    ("row", "column", "read"),
    [
        (PLAIN, "completion", ASKED),
        (INSTRUCTION, "output", ASKED[1:]),
        (INSTRUCTION | {"input": ""}, "output", [message("user", "Add 3 to 4."), ASKED[2]]),
        ({"id": "x", "question": "a\n\nb", "answer": "c"}, "answer", ANSWERED),
        ({"context": "b", "instruction": "a", "response": "c"}, "response", ANSWERED),
        ({"prompt": ASKED[:2], "completion": ASKED[2:]}, "completion", ASKED),
        ({"prompt": ASKED[:2], "completion": "7"}, "completion", ASKED),
        ({"prompt": "not of them", "completion": ASKED}, "completion", ASKED),
        ({"prompt": 7, "response": ASKED[1:]}, "response", ASKED[1:]),
        ({"prompt": "a", "completion": None}, "completion", None),
        ({"conversations": ASKED[1:], "system": "Be brief.", "tools": "[]"}, "conversations", ASKED),
        ({"messages": ASKED, "system": "Be brief."}, "messages", ASKED),
        ({"messages": ASKED[1:], "system": None}, "messages", ASKED[1:]),
        ({"prompt": "not of them", "completion": ASKED[1:], "system": "Be brief."}, "completion", ASKED),
        ({"system_prompt": "Be brief.", "question": "a\n\nb", "response": "c"}, "response", [ASKED[0], *ANSWERED]),
        ({"question": "a", "context": "b", "answer": "c"}, "answer", ANSWERED),
        (INSTRUCTION | {"history": [["a", "b"]]}, "output", RECALLED),
        (
            {"prompt": [message("user", "a"), message("assistant", "b"), ASKED[1]], "completion": "7"},
            "completion",
            RECALLED,
        ),
    ],
)
def test_columns_before_an_answer_are_its_prompt(tmp_path, contents, row, column, read):
    """TRL's prompt and completion, Alpaca's instruction, input and output, and the like: text or messages."""
    table = Dataset.from_list([row] * 2)
    table.save_to_disk(tmp_path / "a.arrow")
    table.to_json(tmp_path / "a.jsonl")
    table.to_parquet(tmp_path / "a.parquet")
    if not any(isinstance(value, list) for value in row.values()):
        table.to_csv(tmp_path / "a.csv")
    for path in tmp_path.glob("a.*"):
        found = str(path) if path.is_dir() else f"{path}*"  # a file without a conversation must not be named itself
        assert contents(found, messages_column=column) == ([read] * 2 if read else [])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": 7, "completion": "a"}, "needs text or messages in column 'prompt', which holds a number"),
        ({"prompt": "a", "completion": 7}, "needs text or messages in column 'completion', which holds a number"),
        ({"prompt": "half \ud83d", "completion": "b"}, "holds half of a surrogate pair"),
        ({"prompt": [{"text": "a"}], "completion": "b"}, "has message 0 without a role"),
        ({"system": "Be kind.", "completion": ASKED}, "begins with a message of the system, and a column of the row"),
        ({"system": "Be kind.", "query": "a", "completion": "b"}, "holds text, not a list of messages, and no row has"),
        ({"completion": "b"}, "holds text, not a list of messages, and no row has its prompt in prompt; name"),
        *(
            ({"history": history, "output": "b"}, "needs pairs of a question and its answer in column 'history'")
            for history in ("[['a', 'b']]", [["a"]], [{"role": "user", "content": "a"}])
        ),
    ],
)
def test_prompt_that_is_none_is_one_line(write, contents, row, problem):
    column = [*row][-1]
    with pytest.raises(UserError, match=rf"a\.jsonl, row 0 \(line 1\): '{column}' ") as caught:
        contents(write("a.jsonl", json.dumps(row)), messages_column=column)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_columns_beside_a_conversation_that_are_not_read_are_told(tmp_path, caplog):
    rows = [{"id": 1, "messages": ASKED, "system": "Be brief."}, {"id": 2, "messages": ASKED, "tools": "[]"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("INFO", "hfgolf"):
        load_tokens(section([str(tmp_path / "a.jsonl")], tmp_path / "cache"), BYTE)
    assert [line for line in caplog.messages if "not read" in line] == [
        "data.messages_column messages: of the other columns, these are not read: id, tools"
    ]


def test_row_without_the_column_of_the_prompt_is_like_one_with_null(write, contents):
    rows = [{"completion": "a"}, {"prompt": "b", "completion": "c"}, {"completion": "d"}, {"prompt": "e"}]
    found = contents(write("a.jsonl", "\n".join(map(json.dumps, rows))), messages_column="completion")
    asked = [message("user", "b"), message("assistant", "c")]
    assert found == [[message("assistant", "a")], asked, [message("assistant", "d")]]


def test_columns_before_an_answer_are_no_other_text_but_other_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"response": ASKED}) + "\n") * 3)
    data = section([str(tmp_path / "a.jsonl")], tmp_path / "cache").replace(messages_column="response")
    corpus = load_corpus(data)
    assert "before_answer" not in corpus.identity and "prompt" in corpus.reading["before_answer"]
    assert "before_answer" in read_manifest(load_tokens(data, BYTE).path)["key"]


@pytest.mark.parametrize("tokenizer", [BYTE, TokenizerSection(), TokenizerSection(kind="char")])
@pytest.mark.parametrize("num_rows", [2, 8])
def test_of_conversations_too_few_to_divide_the_last_validate(tmp_path, num_rows, tokenizer):
    rows = [[message("user", "Q"), message("assistant", f"number {number}")] for number in range(num_rows)]
    tokens = load_tokens(section([write_rows(tmp_path, rows, "few.jsonl")], tmp_path / "cache"), tokenizer)
    assert len(tokens.train.piece_tokens) == num_rows - 1
    learned = tokens.val.tokens[tokens.val.is_target == 1]
    assert tokens.tokenizer.decode(learned) == f"number {num_rows - 1}<|end|>"


def test_text_parts_and_the_developer_are_messages(tmp_path):
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    row = [{"role": "developer", "content": parts}, *ASKED[1:]]
    assert tokens_of(tmp_path, [row] * 2).train.tokens.tolist() == (
        tokens_of(tmp_path / "plain", [ASKED] * 2).train.tokens.tolist()
    )


def test_sharegpt_rows_are_the_same_conversations(tmp_path):
    assistants = itertools.cycle(["gpt", "chatgpt", "bot", "model", "assistant"])
    names = {"user": lambda: "human", "assistant": lambda: next(assistants), "system": lambda: "system"}
    rows = [[{"from": names[m["role"]](), "value": m["content"]} for m in messages] for messages in CONVERSATIONS]
    ours, theirs = tokens_of(tmp_path, CONVERSATIONS).train, tokens_of(tmp_path / "other", rows).train
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.is_target.tolist() == theirs.is_target.tolist()


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize("template", [UNTAGGED, CHATML, CHAT_TEMPLATE])
def test_turns_of_weight_0_are_only_context(tmp_path, name, template):
    """OpenAI's weight: the ids stay, the targets and their bytes are those of the other turns."""
    rows = [
        [message("user", "one"), message("assistant", "skip"), message("user", "two"), message("assistant", "learn")],
        [message("user", "three"), message("assistant", "none")],
    ]
    weights = [[None, 0, 0, 1], [None, 0.0]]
    weighted = [[m | {"weight": w} for m, w in zip(*pair, strict=True)] for pair in zip(rows, weights, strict=True)]
    tokenizer = chatml_tokenizer(template) if template != CHAT_TEMPLATE else byte_tokenizer()
    (plain,) = ConversationEncoder(tokenizer).encode([("a", rows[0])])
    val_files = [write_rows(tmp_path / "val", rows)]
    data = section([write_rows(tmp_path, weighted, name)], tmp_path, val_files=val_files)
    read = load_corpus(data).write_rows(tmp_path / "rows")["train"]
    (part,) = ConversationEncoder(tokenizer).encode([(read[0]["name"], json.loads(read[0]["content"]))])
    assert part.ids == plain.ids and part.num_bytes == len("learn")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    learned = np.array(part.ids)[part.is_target]
    assert tokenizer.decode(learned[:-1]) == "learn" and learned[-1] in ends
    stream = tokens_of(tmp_path / "whole", weighted, name=name).train
    assert len(stream.piece_tokens) == 1 and stream.is_target.sum() == len("learn") + 1  # the second row has no target


def test_trained_tokenizers_reserve_the_special_tokens(tmp_path):
    rows = [[message("user", f"the number {n}"), message("assistant", f"the NUMBER {n + 1} é")] for n in range(300)]
    configs = [TokenizerSection(vocab_size=290), TokenizerSection(vocab_size=290, case_operators=True)]
    for config in [*configs, TokenizerSection(kind="char")]:
        tokens = tokens_of(tmp_path, rows, config)
        assert len(tokens.tokenizer) == (290 if config.kind == "bpe" else 262)
        assert tokens.tokenizer.chat_template.strip() == CHAT_TEMPLATE.strip()
        end = tokens.train.piece_tokens[0]
        answer = tokens.train.tokens[:end][tokens.train.is_target[:end] == 1]
        assert tokens.tokenizer.decode(answer) == "the NUMBER 1 é<|end|>"
        again = tokens_of(tmp_path, rows, config)
        assert again.is_hit and again.train.is_target.tolist() == tokens.train.is_target.tolist()


def test_pretrained_tokenizer_without_a_template_gets_one_and_another_template_is_another_cache(tmp_path, caplog):
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    chatml_tokenizer().save_pretrained(tmp_path / "chatml")
    spaced = UNTAGGED.replace("assistant\\n' }}{%- endif", "assistant\\n' }} {%- endif")
    chatml_tokenizer(spaced).save_pretrained(tmp_path / "other")
    with caplog.at_level("INFO", "hfgolf"):
        bare, chatml, other = (
            tokens_of(tmp_path, CONVERSATIONS, pretrained(tmp_path / name)) for name in ("bare", "chatml", "other")
        )
    assert "has no chat template; it gets one, with <|system|>, <|user|>, <|assistant|>, <|end|> in" in caplog.text
    assert {*CHAT_TOKENS} <= {*bare.tokenizer.get_vocab()} and {*CHAT_TOKENS}.isdisjoint(chatml.tokenizer.get_vocab())
    assert chatml.path != other.path and not other.is_hit
    assert "targets: the assistant's tokens" in caplog.text


def test_another_special_token_that_the_template_names_is_another_cache(tmp_path):
    tokenizer = chatml_tokenizer("{{ bos_token }}" + UNTAGGED)
    for token in ("<|im_start|>", "<|im_end|>"):
        tokenizer.bos_token = token
        tokenizer.save_pretrained(tmp_path / "saved")
        tokens = tokens_of(tmp_path, CONVERSATIONS, pretrained(tmp_path / "saved"))
        assert tokens.tokenizer.convert_ids_to_tokens(int(tokens.train.tokens[1])) == token


def test_of_several_templates_the_default_is_used_and_exported(tmp_path):
    tokenizer = chatml_tokenizer()
    messages = CONVERSATIONS[0]
    expected = ConversationEncoder(tokenizer).encode([("a", messages)])[0].ids
    tokenizer.chat_template = {"default": UNTAGGED, "tool_use": "{{ messages }}"}
    tokenizer.save_pretrained(tmp_path / "several")
    tokens = tokens_of(tmp_path, [messages], pretrained(tmp_path / "several"))
    assert tokens.train.tokens.tolist() == expected
    assert isinstance(tokens.tokenizer.chat_template, dict)
    exported = supporting_files(build_tiny()[0], tokens.tokenizer)
    assert exported["chat_template.jinja"].decode() == UNTAGGED
    tokenizer.chat_template = {"tool_use": UNTAGGED}
    tokenizer.save_pretrained(tmp_path / "none")
    with pytest.raises(UserError, match=r"data\.messages_column: the tokenizer has no chat template") as caught:
        tokens_of(tmp_path, [messages], pretrained(tmp_path / "none"))
    assert "\n" not in str(caught.value)


def test_conversations_without_an_answer_are_skipped_and_said(tmp_path, caplog):
    rows = [CONVERSATIONS[0], [message("user", "Hello?")], [], CONVERSATIONS[0]]
    with caplog.at_level("INFO", "hfgolf"):
        tokens = tokens_of(tmp_path, rows)
    assert len(tokens.train.piece_tokens) == 2
    assert "train: skipped 1 of 3 conversations without an assistant's turn" in caplog.text
    for turn in ([], [message("assistant", "b") | {"weight": 0}]):
        with pytest.raises(UserError, match="no document has a turn of the assistant to learn in"):
            tokens_of(tmp_path / f"other{len(turn)}", [[message("user", "Hello?"), *turn]])
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"data\.messages_column: .*a\.txt has no columns"):
        load_tokens(section([str(tmp_path / "a.txt")], tmp_path), BYTE)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("Hello", "holds text, not a list of messages; name a column of text by data.text_column"),
        (["Hello"], "holds str as message 0, not role and content"),
        ([{"content": "a"}], "has message 0 without a role (or from)"),
        ([message("user", "a"), {"role": "assistant"}], "has NoneType as content of message 1, not text"),
        ([{"role": "assistant", "content": [{"text": "b"}]}], "has a part of type None in message 0; only text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "has a part of type 'image_url' in message 0; only"),
        ([{"role": "user", "content": ["a"]}], "has a part of type 'str' in message 0; only text can be trained on"),
        ([{"from": "human", "value": 3}], "has int as value of message 0, not text"),
        ([message("assistant", "half \ud83d")], "holds half of a surrogate pair ('\\ud83d' at character 5)"),
        *(
            ([message(role, "a")], f"has role {role!r} in message 0; allowed: system, user")
            for role in ("tool", "ASSISTANT", "assistant ")
        ),
        *(
            ([message("user", "a"), message("assistant", "b") | {key: value}], f"has {key!r} in message 1, which")
            for key, value in FIELDS_REFUSED.items()
        ),
        *(
            ([message("user", "a"), message("assistant", "b") | {"weight": weight}], f"has weight {weight!r} in")
            for weight in (-1, 0.5, "0", False, [0])
        ),
        ([message("user", "a") | {"weight": 1}, message("assistant", "b")], "has weight 1 in message 0 of user"),
    ],
)
def test_row_that_is_no_conversation_is_one_line(tmp_path, row, problem):
    with pytest.raises(UserError) as caught:
        tokens_of(tmp_path, [row])
    assert f"rows/train.jsonl, row 0 (line 1): 'messages' {problem}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (UNTAGGED.replace("<|im_start|>assistant", "<|im_start|>model"), "writes the first 1 messages differently"),
        (UNTAGGED.replace("message['content'] + '<|im_end|>'", "message['content']"), "ends no turn of the assistant"),
        (CHATML.replace("'assistant'", "'bot'"), "it marks no turn of the assistant"),
        ("{{ raise_exception('Only one message, please') }}", "not fit the chat template: Only one message, please."),
        ("{{ messages[", "does not fit the chat template"),
        ("{{ 1 / 0 }}", "does not fit the chat template: ZeroDivisionError: division by zero."),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "template: RecursionError: maximum recursion depth"),
        ("{{ messages[0] + 1 }}", "does not fit the chat template: TypeError: unsupported operand"),
    ],
)
def test_template_that_does_not_show_the_answers_is_one_line(tmp_path, template, problem):
    chatml_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError) as caught:
        tokens_of(tmp_path, CONVERSATIONS, pretrained(tmp_path / "tokenizer"))
    assert problem in str(caught.value) and "jsonl#0" in str(caught.value) and "\n" not in str(caught.value)


def test_pieces_are_the_text_of_the_messages(tmp_path):
    data = section([write_rows(tmp_path / "rows", CONVERSATIONS * 5)], tmp_path)
    pieces = load_corpus(data).write_pieces(tmp_path / "pieces")
    assert {*pieces["train"]["text"], *pieces["val"]["text"]} == {
        "".join(message["content"] for message in messages) for messages in CONVERSATIONS
    }


def test_answers_stop_at_the_end_of_a_turn():
    tokenizer = find_tokenizer(BYTE, {}, Path("unused"))
    assert stop_ids(tokenizer) == [END_OF_TEXT]
    add_chat_template(tokenizer)
    assert stop_ids(tokenizer) == [END_OF_TEXT, END]
    assert stop_ids(spaced_tokenizer()) == spaced_tokenizer().convert_tokens_to_ids(["</s>", "<|im_end|>"])
    for template in ("{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        tokenizer.chat_template = template
        assert stop_ids(tokenizer) == [END_OF_TEXT]
        with pytest.raises(UserError, match="The conversation does not fit the chat template: "):
            ConversationEncoder(tokenizer).encode_prompt([{"role": "user", "content": "a"}])
