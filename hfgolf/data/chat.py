"""Conversations as documents of the token cache, with a mask of the tokens that the assistant writes.

The assistant's are those of its turns and the special token that ends each turn, so that a model learns to stop. A
conversation is encoded as apply_chat_template does, except that a special token which a message spells stays text.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from hfgolf.data.documents import Messages, is_learned
from hfgolf.system.errors import UserError
from hfgolf.system.wording import first_line, shortened

CHAT_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# Each turn is between special tokens, so the tokens of a prompt are the same with and without the answer.
CHAT_TEMPLATE = """\
{{- bos_token or eos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "<|assistant|>" }}{% generation %}{{ message.content + "<|end|>" }}{% endgeneration %}
    {%- elif message.role in ["system", "user"] %}
        {{- "<|" + message.role + "|>" + message.content + "<|end|>" }}
    {%- else %}
        {{- raise_exception("role " + message.role + "; allowed: system, user, assistant") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
{%- endif %}
"""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Span = tuple[int, int]
"""The characters [start, end) of a text."""
_CUT = "\ud800"  # where a rendered text is cut before it is encoded; text in UTF-8 cannot contain it


def add_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a tokenizer hfgolf's chat template and its four special tokens."""
    tokenizer.add_special_tokens({"extra_special_tokens": CHAT_TOKENS}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE


def chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a tokenizer's chat template. Raises UserError if it has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise UserError(
            "data.messages_column: the tokenizer has no chat template, or none as its default, and a resumed run keeps"
            " its tokenizer; start a new run, or name another tokenizer."
        ) from None


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: the end of text, and what ends the assistant's turn in the template."""
    ids = [int(tokenizer.eos_token_id)]
    if not tokenizer.chat_template:
        return ids
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        text = str(tokenizer.apply_chat_template([question, answer], tokenize=False)).rstrip()
    except Exception:  # it wants other messages, or fails in its own way
        return ids
    tokens = tokenizer.added_tokens_decoder.items()
    ends = [number for number, token in tokens if token.special and text.endswith(token.content)]
    return list(dict.fromkeys(ids + ends))


class EncodedConversation(NamedTuple):
    """A conversation as tokens, which of them the loss counts, and the raw UTF-8 bytes of their text."""

    ids: list[int]
    is_target: np.ndarray
    num_bytes: int


class ConversationEncoder:
    """Encodes conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._template = chat_template(tokenizer)
        self._named_tokens = tokenizer.special_tokens_map
        self._separator = tokenizer.eos_token_id
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        # one of a single character, such as a "!" for padding, is also what spells that character
        longest_first = sorted((token for token in self._special if len(token) > 1), key=len, reverse=True)
        self._is_special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()

    def encode(self, rows: list[tuple[str, Messages]]) -> list[EncodedConversation]:
        """Return conversations, given with their names, as tokens; each starts a separator."""
        rendered = [self._render(name, messages) for name, messages in rows]
        parts = [text.split(_CUT) for text, _ in rendered]
        encodings = iter(self._encode_parts(list(itertools.chain(*parts))))
        found = []
        for (text, turns), part in zip(rendered, parts, strict=True):
            ids: list[int] = []
            offsets, begin = [], 0
            for piece in part:
                encoding = next(encodings)
                ids += encoding.ids
                offsets.append(np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin)
                begin += len(piece) + len(_CUT)
            is_target = _is_inside(np.concatenate(offsets), turns)
            if not ids or ids[0] != self._separator:
                ids, is_target = [self._separator, *ids], np.append(False, is_target)
            learned = "".join(self._is_special.sub("", text[start:end]) for start, end in turns)
            found.append(EncodedConversation(ids, is_target, len(learned.replace(_CUT, "").encode())))
        return found

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return a conversation as tokens, up to where the assistant's next turn begins."""
        try:
            text, _ = self._fill_in(self._escaped(messages), add_generation_prompt=True)
        except Exception as error:
            raise UserError(f"The conversation does not fit the chat template: {_reason(error)}.") from None
        return [number for encoding in self._encode_parts(text.split(_CUT)) for number in encoding.ids]

    def _encode_parts(self, parts: list[str]) -> list[Encoding]:
        try:
            return self._backend.encode_batch(parts, add_special_tokens=False)
        except BaseException as error:  # a panic of the library is no Exception
            raise encoding_error(self._backend, parts, error) from error

    def _render(self, name: str, messages: Messages) -> tuple[str, list[_Span]]:
        try:
            text, turns = self._text_and_turns(self._escaped(messages))
            if not turns:
                raise ValueError("it marks no turn of the assistant")
            learned = [is_learned(message) for message in messages if message["role"] == "assistant"]
            if not all(learned):
                if len(turns) != len(learned):
                    raise ValueError("it does not mark each turn of the assistant once, so none can have weight 0")
                turns = list(itertools.compress(turns, learned))
            return text, [(start, start + len(self._turn(text[start:end]))) for start, end in turns]
        except Exception as error:  # a template can divide by zero, call itself without end, or index what is not there
            raise UserError(f"{name} does not fit the chat template: {_reason(error)}.") from None

    def _text_and_turns(self, messages: Messages) -> tuple[str, list[_Span]]:
        if _GENERATION_TAG.search(self._template):
            return self._fill_in(messages, return_assistant_tokens_mask=True)
        text, _ = self._fill_in(messages)

        def length(num_messages: int, add_generation_prompt: bool) -> int:
            first, _ = self._fill_in(messages[:num_messages], add_generation_prompt=add_generation_prompt)
            if not text.startswith(first):
                raise ValueError(
                    f"it writes the first {num_messages} messages differently if more follow, so nothing tells which"
                    " text is the assistant's; put {% generation %} and {% endgeneration %} around it in the template"
                )
            return len(first)

        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [(length(number, True), length(number + 1, False)) for number in numbers]

    def _fill_in(self, messages: Messages, **options: bool) -> tuple[str, list[_Span]]:
        arguments: dict[str, Any] = {**self._named_tokens, **options}
        texts, turns = cast(Any, render_jinja_template)([messages], chat_template=self._template, **arguments)
        return texts[0], turns[0] if turns else []

    def _turn(self, text: str) -> str:
        """Return a turn up to the special token that ends it; a line break that follows is no part of it."""
        turn = text.rstrip()
        if not turn.endswith(self._special):
            raise ValueError(
                "it ends no turn of the assistant with a special token, so a model would not learn to stop"
            )
        return turn

    def _escaped(self, messages: Messages) -> Messages:
        cut = partial(self._is_special.sub, lambda match: match[0][:1] + _CUT + match[0][1:])
        return [{"role": message["role"], "content": cut(message["content"])} for message in messages]


def _reason(error: Exception) -> str:
    """Return what a template failed of; Python's own errors with their kind."""
    kind = "" if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: "
    return kind + first_line(error).rstrip(".")


def _is_inside(offsets: np.ndarray, turns: list[_Span]) -> np.ndarray:
    """Return which tokens, (n, 2) start and end, overlap one of the turns, which are in order; (n,) bool."""
    starts, ends = np.array(turns, np.int64).reshape(-1, 2).T
    following = np.searchsorted(ends, offsets[:, 0], side="right")  # the first turn that ends after the token's start
    return offsets[:, 1] > np.append(starts, np.iinfo(np.int64).max)[following]


def encoding_error(backend: Tokenizer, texts: list[str], error: BaseException) -> BaseException:
    """Return the error that names the text which a tokenizer cannot encode; another error as it is."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    for text in texts:
        try:
            backend.encode(text, add_special_tokens=False)
        except BaseException:
            return UserError(
                f"tokenizer: it cannot encode the text that begins {shortened(text)} ({first_line(error).rstrip('.')});"
                " name another tokenizer, or remove this text."
            )
    return error
