"""The FLOPs of training, counted from the model's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from hfgolf.model.layers_golf import layer_order
from hfgolf.model.modeling_golf import GolfForCausalLM


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


def training_flops_per_token(model: GolfForCausalLM, sequence_length: int) -> float:
    """Return the useful FLOPs of one token's forward and backward pass, as MFU counts them."""
    return token_flops(model, sequence_length).useful


def token_flops(model: GolfForCausalLM, sequence_length: int) -> TokenFlops:
    """Count the FLOPs per token in a sequence of the given length. The model may be on the meta device.

    - Each weight that multiplies the token costs 6 FLOPs: two forward and four backward (Kaplan et al. 2020, section
      2.1). This includes the head but not the embedding lookup.
    - A pass runs the layers of an active loop several times, each with its FLOPs.
    - The two matmuls of attention cost 6 * width * context per layer. That is half of PaLM's count (Chowdhery et al.
      2022, appendix B), because causal attention only needs half of the scores.
    - Norms, activations, softmax and the optimizer are not counted, as in PaLM and in torch's FlopCounterMode.
    - Recomputation is each block's forward pass without its last matmul: the backward pass does not need its result, so
      torch.utils.checkpoint stops before it.
    """
    config, order = model.config, layer_order(model.config)
    products = {name: p.numel() for name, p in model.named_parameters() if name.endswith(("proj.weight", ".head_gate"))}
    in_layers = sum(
        sum(size for name, size in products.items() if name.startswith(f"model.layers.{index}.")) for index in order
    )
    outside = sum(size for name, size in products.items() if ".layers." not in name)
    is_scaled = config.branch_scale or config.lanes  # then the gradient of the scale needs the last matmul's result
    last_matmuls = 0 if is_scaled else len(order) * config.hidden_size * config.intermediate_size
    attention = len(order) * config.hidden_size * sequence_length
    return TokenFlops(
        matrices=6.0 * (in_layers + outside),
        attention=6.0 * attention,
        head=6.0 * config.vocab_size * (config.embedding_size or config.hidden_size),
        recomputation=2.0 * (in_layers - last_matmuls) + 2.0 * attention,
    )
