"""How many floating-point operations training takes, counted from the model's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from hfgolf.model.modeling_golf import GolfForCausalLM


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward and backward pass, by what they are spent on."""

    matrices: float
    """The weights of the blocks."""
    attention: float
    """Queries with keys and weights with values."""
    head: float
    recomputation: float
    """What gradient checkpointing would compute a second time: no useful work, so not in the others."""

    @property
    def useful(self) -> float:
        """The work of the model, which MFU counts (Chowdhery et al. 2022, appendix B)."""
        return self.matrices + self.attention + self.head


def training_flops_per_token(model: GolfForCausalLM, sequence_length: int) -> float:
    """Return the useful FLOPs of one token's forward and backward pass: what MFU counts."""
    return token_flops(model, sequence_length).useful


def token_flops(model: GolfForCausalLM, sequence_length: int) -> TokenFlops:
    """Count the FLOPs of one token in a sequence of this length; the model may lie on the meta device.

    Six for each weight that multiplies it (two forward, four backward: Kaplan et al. 2020, section 2.1), the head
    included and the embedding look-up not, and for attention's two products 6 x width x context a layer: the causal
    half of what PaLM counts (Chowdhery et al. 2022, appendix B), because the other half need not be computed. Norms,
    activations, softmax and the optimizer are left out, as there and by torch's FlopCounterMode.

    Recomputation is the forward pass of each block up to its last product, whose result the backward pass does not need
    (torch.utils.checkpoint stops there).
    """
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name)
    last_products = config.num_hidden_layers * config.hidden_size * config.intermediate_size
    attention = config.num_hidden_layers * config.hidden_size * sequence_length
    return TokenFlops(
        matrices=6.0 * matrices,
        attention=6.0 * attention,
        head=6.0 * config.vocab_size * config.hidden_size,
        recomputation=2.0 * (matrices - last_products) + 2.0 * attention,
    )
