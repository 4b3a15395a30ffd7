"""The FLOPs of training, counted from the model's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hfgolf.model.layers_golf import layer_order
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import parameter_kinds


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward and backward pass, by component."""

    matrices: float
    """The weight matrices of the blocks, and projections of embeddings."""
    attention: float
    """Queries times keys, and attention weights times values."""
    head: float
    recomputation: float
    """Extra work under gradient checkpointing. Not useful work, so not part of the other fields."""

    @property
    def useful(self) -> float:
        """The FLOPs that MFU counts (Chowdhery et al. 2022, appendix B)."""
        return self.matrices + self.attention + self.head


def training_flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the useful FLOPs of one token's forward and backward pass, as MFU counts them."""
    return token_flops(model, sequence_length).useful


def token_flops(model: PreTrainedModel, sequence_length: int) -> TokenFlops:
    """Count the FLOPs per token in a sequence of the given length. The model may be on the meta device.

    - Each weight that multiplies the token costs 6 FLOPs: two forward and four backward (Kaplan et al. 2020, section
      2.1). This includes the head but not the embedding lookup.
    - A pass runs the layers of an active loop several times, each with its FLOPs.
    - The two matmuls of attention cost 6 * width * context per layer. That is half of PaLM's count (Chowdhery et al.
      2022, appendix B), because causal attention only needs half of the scores.
    - Norms, activations, softmax and the optimizer are not counted, as in PaLM and in torch's FlopCounterMode.
    - A frozen weight has no gradient: 4 FLOPs, or 2 if nothing before it is trained. Of attention, 2 of the 6 are
      forward, and 4 backward in the layers that gradients reach.
    - Recomputation is each block's forward pass, for Golf without its last matmul: the backward pass does not need its
      result, so torch.utils.checkpoint stops before it.
    - Of a stack of experts, a token multiplies those that it is routed to. The routers are not counted, nor what a
      recurrent layer computes without weights, such as Mamba's scan.
    """
    config: Any = model.config
    head, kinds, factors = model.get_output_embeddings(), parameter_kinds(model), _factors(model)
    order = layer_order(config) if isinstance(model, GolfForCausalLM) else None
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    share = min(1.0, (getattr(config, "num_experts_per_tok", None) or 1) / experts)
    matrices = []
    for name, parameter in model.named_parameters():
        if kinds[name] == "matrix" or name.endswith(".head_gate"):
            passes = 1 if order is None or ".layers." not in name else order.count(int(name.split(".")[2]))
            matrices.append((factors[name], passes * parameter.numel() * (share if parameter.ndim > 2 else 1)))
    convolutions = (module for module in model.named_modules() if isinstance(module[1], nn.Conv1d))
    matrices += [(factors[f"{name}.weight"], module.weight.numel()) for name, module in convolutions]
    contexts = attention_contexts(config, sequence_length) if order is None else [sequence_length] * len(order)
    attention = getattr(config, "num_attention_heads", 0) * head_size(config) * sum(contexts)
    recomputed = all_sizes = sum(size for _, size in matrices)
    reached = sum(size for factor, size in matrices if factor > 2)  # by gradients
    if order is not None:
        outside = (p for name, p in model.named_parameters() if kinds[name] == "matrix" and ".layers." not in name)
        recomputed -= sum(p.numel() for p in outside)
        is_scaled = config.branch_scale or config.lanes  # then the gradient of the scale needs the last matmul's result
        recomputed -= 0 if is_scaled else len(order) * config.hidden_size * config.intermediate_size
    return TokenFlops(
        matrices=sum(factor * size for factor, size in matrices),
        attention=(2.0 + 4.0 * reached / (all_sizes or 1.0)) * attention,
        head=0.0 if head is None else _of_head(model) * head.weight.numel(),
        recomputation=2.0 * recomputed + 2.0 * attention,
    )


def _factors(model: PreTrainedModel) -> dict[str, float]:
    """Return the FLOPs per weight of each parameter: two forward, two for its input's gradient, two for its own."""
    factors, flows = {}, False
    for name, parameter in model.named_parameters():  # in the order of the forward pass
        flows = flows or parameter.requires_grad
        factors[name] = 2.0 + 2.0 * flows + 2.0 * parameter.requires_grad
    return factors


def _of_head(model: PreTrainedModel) -> float:
    """Return those of the head, which may be the embedding, too."""
    flows = any(parameter.requires_grad for parameter in model.parameters())
    return 2.0 + 2.0 * flows + 2.0 * model.get_output_embeddings().weight.requires_grad


def head_size(config: Any) -> int:
    """Return the width of an attention head; 0 without attention."""
    heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "head_dim", None) or config.hidden_size // heads if heads else 0


def attention_contexts(config: Any, sequence_length: int) -> list[int]:
    """Return the longest context of each attention layer, in tokens. Layers of other types are left out."""
    if not getattr(config, "num_attention_heads", 0):
        return []
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = min(sequence_length, getattr(config, "sliding_window", None) or sequence_length)
    contexts = {"full_attention": sequence_length, "sliding_attention": window, "attention": sequence_length}
    return [contexts[kind] for kind in types if kind in contexts]
