"""Talk with a model in the terminal: hfgolf chat runs/small

A base model continues what you type; a chat model (data.messages_column) answers it and remembers the conversation.
/temperature 0.5 and the like change the settings, and /help lists them. If standard input is no terminal, each of its
lines is a prompt, and only the answers are printed:

    hfgolf chat runs/small < prompts.txt
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hfgolf.commands.options import SAMPLING, ScriptParser, add_model, add_sampling, read_utf8, take_words
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError
from hfgolf.system.wording import close_match
from hfgolf.train.console import quiet_libraries, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hfgolf.evaluate.sample import TextStream

_COMMANDS = {
    "/reset": "forget the conversation, with a chat model",
    "/help": "show this list",
    "/quit": "end, like Ctrl-D; Ctrl-C ends an answer",
}
_NAMES = [*(f"/{name}" for name in SAMPLING), *_COMMANDS]


def main() -> None:
    parser = ScriptParser(__doc__, has_json=False)
    add_model(parser)
    add_sampling(parser)
    arguments = parser.parse_intermixed_args()
    if rest := take_words(arguments):
        raise UserError(f"{rest[0]}: chat takes a model only; type the prompts, or pipe them in.")
    name, settings = arguments.model, {name: getattr(arguments, name) for name in SAMPLING}
    found = find_model(name)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        print(f"{found}\nType the start of a text, or a message to a chat model. /help lists the settings.")
    elif found != name:
        print(f"model: {found}", file=sys.stderr)
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(_load, name, found)
        for line in _lines(is_terminal):
            if line.split()[:1] == ["/quit"]:
                return
            try:
                if line.startswith("/") and close_match(line.split()[0], _NAMES):  # a text may begin with a slash, too
                    _obey(line, settings, loading.result)
                else:
                    _answer(loading.result(), line, settings, is_terminal)
            except UserError as error:
                if not is_terminal or (loading.done() and loading.exception()):
                    raise
                print(error.shown(), file=sys.stderr)
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                print()
        loading.result()  # a model that cannot be loaded is an error even if nothing was asked


class Talk:
    """A model, and what was said to it and by it if its tokenizer has a chat template."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.is_chat = bool(tokenizer.chat_template)
        self._model, self._tokenizer = model, tokenizer
        self.messages: list[dict[str, str]] = []

    def answer(self, line: str, write: Callable[[str], object], settings: dict[str, Any]) -> TextStream:
        """Write the continuation of a text, or the answer to a message, piece by piece; return what was written.

        An answer that is interrupted remains in the conversation. Raises UserError like `generate_ids`.
        """
        from hfgolf.data.chat import stop_ids
        from hfgolf.evaluate.sample import TextStream, conversation_ids, generate_ids, text_ids

        if not self.is_chat:
            ids = text_ids(self._tokenizer, line)
            stream = TextStream(self._tokenizer, ids[1:], write)
            generate_ids(self._model, self._tokenizer, ids, streamer=stream, **settings)
            return stream
        messages = [*self.messages, {"role": "user", "content": line}]
        context = getattr(self._model.config, "max_position_embeddings", None)
        while len(ids := conversation_ids(self._tokenizer, messages)) >= (context or math.inf) and len(messages) > 1:
            messages = messages[2:]  # the model can't read them all
        stream = TextStream(self._tokenizer, [], write)
        stops = stop_ids(self._tokenizer)
        try:
            generate_ids(self._model, self._tokenizer, ids, streamer=stream, eos_token_id=stops, **settings)
        finally:
            if stream.text:
                self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        return stream


def _load(name: str, found: str) -> Talk:
    from hfgolf.publish.load import load_exported

    quiet_libraries()
    model, tokenizer = load_exported(name)
    if model.name_or_path != found:  # a run that trains has deleted that checkpoint
        print(f"model: {model.name_or_path}", file=sys.stderr)
    with suppress(UserError):  # the first pass takes longer than others; a model that fails says so when it is asked
        Talk(model, tokenizer).answer("a", len, dict.fromkeys(("max_new_tokens", "top_k"), 1))
    return Talk(model, tokenizer)


def _lines(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            yield read_utf8(f"standard input, line {number}", line).rstrip("\r\n")
        return
    with suppress(ImportError):  # input() then has a history and the keys of a shell; Windows has its own
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
        else:
            yield line


def _answer(talk: Talk, line: str, settings: dict[str, Any], is_terminal: bool) -> None:
    def write(piece: str) -> None:
        print(shown(piece) if sys.stdout.isatty() else piece, end="", flush=True)

    if is_terminal:  # which decodes what is typed as its locale says
        line = read_utf8("this line", line)
        if not talk.is_chat:
            write(line)
    started_at = time.perf_counter()
    stream = talk.answer(line, write, settings)
    seconds = time.perf_counter() - started_at
    print()
    if is_terminal:
        print(f"[{stream.num_tokens} tokens, {stream.num_tokens / seconds:,.0f} tokens/s]", file=sys.stderr)
    settings["seed"] += 1


def _obey(line: str, settings: dict[str, Any], talk: Callable[[], Talk]) -> None:
    command, _, value = line.strip().partition(" ")
    if command not in _NAMES:
        raise UserError(f"there is no command {command}; did you mean {close_match(command, _NAMES)}?")
    if command == "/reset":
        talk().messages = []
    elif command == "/help":
        rows = {f"/{name} {settings[name]}": text for name, (_, _, text) in SAMPLING.items()} | _COMMANDS
        print(*(f"  {usage:<22}{text}" for usage, text in rows.items()), sep="\n", file=sys.stderr)
    elif value:
        try:
            settings[command[1:]] = SAMPLING[command[1:]][0](value)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{command}: {error}.") from None
    else:
        print(f"{command} {settings[command[1:]]}", file=sys.stderr)
