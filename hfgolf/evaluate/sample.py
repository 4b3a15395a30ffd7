"""Text that a model writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

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
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation; temperature 0 is greedy.

    The prompt follows a document separator, as every document did in training; without a prompt the model starts a
    document. The random generators are left as they were.
    """
    was_training = model.training
    model.eval()
    ids = [tokenizer.eos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    input_ids = torch.tensor([ids], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    model.train(was_training)
    return tokenizer.decode(output[0, 1:], skip_special_tokens=True)
