"""Text generation: the continuation of a text, and the answer in a conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from hfgolf.data.chat import ConversationEncoder, stop_ids
from hfgolf.data.documents import Messages
from hfgolf.data.tokenizer import text_start
from hfgolf.evaluate.context import evaluation_mode, max_positions, require_embedded
from hfgolf.system.errors import UserError

FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The kernels of SDPA without cuDNN's, which takes a tenth of a second to plan for each new length of the KV cache."""


def generate_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str = "", **options: Any) -> str:
    """Return the prompt and its continuation. options: those of `generate_ids`, which raises UserError."""
    ids = generate_ids(model, tokenizer, text_ids(tokenizer, prompt), **options)
    return str(tokenizer.decode(ids[1:], skip_special_tokens=True))


def generate_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, message: str, **options: Any) -> str:
    """Return the answer of a chat model to a user's message. options: those of `generate_ids`, which raises UserError.

    Raises UserError, too, if the tokenizer has no chat template.
    """
    ids = conversation_ids(tokenizer, [{"role": "user", "content": message}])
    answer = generate_ids(model, tokenizer, ids, eos_token_id=stop_ids(tokenizer), **options)[len(ids) :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a prompt as tokens. It follows what begins a document: a separator, or the tokenizer's own <s>.

    Without a text, it starts a new document. Raises UserError if the tokenizer has no separator.
    """
    _require_separator(tokenizer)
    return [*text_start(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]


def conversation_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return a conversation as tokens, up to where the assistant's next turn begins.

    Raises UserError if the tokenizer has no chat template, or no separator.
    """
    if not (tokenizer.chat_template and isinstance(tokenizer, PreTrainedTokenizerFast)):
        raise UserError("--message: the tokenizer of --model has no chat template; name a chat model, or use --prompt.")
    _require_separator(tokenizer)
    return ConversationEncoder(tokenizer).encode_prompt(messages)


class TextStream(BaseStreamer):
    """Passes on what a model writes, in whole characters, while it writes: a `streamer` for `generate_ids`.

    context: the tokens before it that decide how it is decoded; after them, some tokenizers write a space. write: takes
    each piece of text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: list[int], write: Callable[[str], object]) -> None:
        self.text = ""
        """What has been passed on."""
        self.num_tokens = 0
        self._tokenizer, self._ids, self._write = tokenizer, list(context), write
        self._begins_at = len(self._decode())
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if self._is_prompt:  # generate passes it first
            self._is_prompt = False
            return
        self._ids += value.flatten().tolist()
        self.num_tokens += value.numel()
        self._pass_on(self._decode().rstrip("\ufffd"))  # the other bytes of a character may follow

    def end(self) -> None:
        self._pass_on(self._decode())

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _pass_on(self, text: str) -> None:
        if piece := text[self._begins_at + len(self.text) :]:
            self.text += piece
            self._write(piece)


def _require_separator(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("--model: its tokenizer has no eos_token to start a document with; use a model that has one.")


@torch.no_grad()
def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    **others: Any,
) -> list[int]:
    """Return the given ids and their continuation. temperature 0 is greedy; top_k 0 and top_p 1 exclude no token.

    others: what else `generate` takes: eos_token_id, if it is not that of the model, and a streamer. With learned
    positions, the text ends at the last position. The random generators and the model's mode are restored.

    Raises UserError if a setting is out of range, the prompt leaves no room for a token, an id is outside the model's
    embedding, or the logits are not finite.
    """
    if not (max_new_tokens >= 1 and (temperature == 0 or temperature >= 1e-3) and top_k >= 0 and 0 < top_p <= 1):
        raise UserError(
            "A setting is out of range; allowed: max_new_tokens from 1, temperature 0 or from 0.001, top_k from 0,"
            " top_p above 0, up to 1."
        )
    require_embedded(max(ids), next(model.get_input_embeddings().parameters()).shape[0])
    limit = max_positions(model)
    if limit is not None and len(ids) >= limit:
        raise UserError(f"The prompt has {len(ids) - 1} tokens, but this model takes at most {limit - 2}; shorten it.")
    input_ids = torch.tensor([ids], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), evaluation_mode(model), sdpa_kernel(FOR_ANY_LENGTH):
        torch.manual_seed(seed)
        output = model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)),
            min_new_tokens=1 if ids[-1] == text_start(tokenizer)[-1] else None,  # no document is empty
            pad_token_id=tokenizer.eos_token_id,
            logits_processor=[_require_finite],
            **sampling,
            **others,
        )
    return output[0].tolist()


def _require_finite(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Return the logits, (B, V), if each row has a finite maximum.

    Sampling from other rows raises on a CPU. On a GPU it triggers a device assertion, which no process survives.
    """
    if not logits.amax(-1).isfinite().all():
        raise UserError("The model's logits are not finite, so it cannot generate text; use an earlier checkpoint.")
    return logits
