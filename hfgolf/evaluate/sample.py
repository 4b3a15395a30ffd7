"""Text generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfgolf.errors import UserError
from hfgolf.evaluate.context import evaluation_mode, max_positions, require_embedded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation. temperature 0 is greedy; top_k 0 and top_p 1 exclude no token.

    The prompt follows a document separator, like every document in training. Without a prompt, the model starts a new
    document. With learned positions, the text ends at the last position. The random generators and the model's mode
    are restored.

    Raises UserError if the prompt leaves no room for a token, the tokenizer has no separator, an id is outside the
    model's embedding, or the logits are not finite.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("--model: its tokenizer has no eos_token to start a document with; use a model that has one.")
    ids = [tokenizer.eos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    require_embedded(max(ids), next(model.get_input_embeddings().parameters()).shape[0])
    limit = max_positions(model)
    if limit is not None and len(ids) >= limit:
        raise UserError(f"The prompt has {len(ids) - 1} tokens, but this model takes at most {limit - 2}; shorten it.")
    input_ids = torch.tensor([ids], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), evaluation_mode(model):
        torch.manual_seed(seed)
        output = model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)),
            pad_token_id=tokenizer.eos_token_id,
            logits_processor=[_require_finite],
            **sampling,
        )
    return str(tokenizer.decode(output[0, 1:], skip_special_tokens=True))


def _require_finite(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Return the logits, (B, V), if each row has a finite maximum.

    Sampling from other rows raises on a CPU. On a GPU it triggers a device assertion, which no process survives.
    """
    if not logits.amax(-1).isfinite().all():
        raise UserError("The model's logits are not finite, so it cannot generate text; use an earlier checkpoint.")
    return logits
