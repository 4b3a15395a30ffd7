"""The architecture of a Golf model: one validated config field per choice.

Owns the names, defaults and allowed values. Knows nothing about weights or computation. Saving a model copies this
file next to the weights, so it imports only transformers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "position_embedding": ("rope", "learned", "none"),
    "activation": ("relu2", "gelu", "gelu_new", "silu", "swiglu"),
}
_POSITIVE_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_BOOLEANS = ("use_bias", "qk_norm", "embedding_norm", "tie_word_embeddings", "use_cache")
_POSITIVE_NUMBERS = ("rope_theta", "norm_eps")
_POSITIVE_NUMBERS_OR_NONE = ("logit_soft_cap", "initializer_range")


class GolfConfig(PreTrainedConfig):
    """Configure a Golf model. The defaults describe a modern decoder block.

    For GPT-2, set norm="layernorm", position_embedding="learned", activation="gelu_new", use_bias=True, qk_norm=False
    and embedding_norm=False.

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads. Must divide hidden_size.
        num_key_value_heads: number of key-value heads. Must divide num_attention_heads, and defaults to it.
        intermediate_size: width of the MLP. Defaults to 4 * hidden_size.
        max_position_embeddings: longest sequence, in tokens. A hard limit only for learned positions.
        norm: "rmsnorm" | "layernorm", for the residual stream. (qk_norm always uses RMSNorm.)
        position_embedding: "rope" | "learned" | "none".
        activation: "relu2" (squared ReLU) | "gelu" | "gelu_new" (GPT-2's tanh form) | "silu" | "swiglu" (gated).
        use_bias: add biases to the linear layers and LayerNorm. The head never has one.
        qk_norm: apply RMSNorm to each query and key head before RoPE.
        embedding_norm: normalize the embeddings before the first block.
        logit_soft_cap: replace the logits z by cap * tanh(z / cap). None: no cap.
        tie_word_embeddings: share one matrix between the embedding and the head.
        dropout: dropout rate after the embedding and on each residual branch, in training.
        attention_dropout: dropout rate on the attention weights, in training.
        rope_theta: base of the RoPE wavelengths.
        norm_eps: added to the mean square (variance, for LayerNorm) in every norm.
        initializer_range: initial standard deviation of the input matrices and of untied embeddings.
            None: 0.5 / sqrt(fan-in) for matrices and 0.02 for embeddings.
        use_cache: cache keys and values during generation.

    Raises:
        ValueError: a field has the wrong type or value. The message names the field, its value and what is allowed.
    """

    model_type = "golf"
    keys_to_ignore_at_inference = ("past_key_values",)
    # Makes save_pretrained ship this file and write the auto_map that AutoConfig reads.
    _auto_class: ClassVar[str | None] = "AutoConfig"

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = None  # type: ignore[assignment]  # None only until __post_init__
    intermediate_size: int = None  # type: ignore[assignment]  # None only until __post_init__
    max_position_embeddings: int = 1024
    norm: str = "rmsnorm"
    position_embedding: str = "rope"
    activation: str = "relu2"
    use_bias: bool = False
    qk_norm: bool = True
    embedding_norm: bool = True
    logit_soft_cap: float | None = None
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    initializer_range: float | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._require_integer("hidden_size", 1)  # before the multiplication below
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self._validate_fields()
        self._validate_shapes()
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Return the size of one head."""
        return self.hidden_size // self.num_attention_heads

    def _validate_fields(self) -> None:
        # transformers does not check the field types of a subclass: the string '64' would fail far from here
        for name in _POSITIVE_INTEGERS:
            self._require_integer(name, 1)
        for name in _BOOLEANS:
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        for name, allowed in _CHOICES.items():
            self._require(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))
        for name in _POSITIVE_NUMBERS:
            self._require(name, _is_positive_number(getattr(self, name)), "a number above 0")
        for name in _POSITIVE_NUMBERS_OR_NONE:
            value = getattr(self, name)
            self._require(name, value is None or _is_positive_number(value), "a number above 0, or None")
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            self._require(name, _is_number(rate) and 0 <= rate < 1, "a number in [0, 1)")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token_id in value if isinstance(value, list) and name == "eos_token_id" else [value]:
                allowed_id = token_id is None or (_is_integer(token_id) and 0 <= token_id < self.vocab_size)
                self._require(name, allowed_id, f"None or a token id from 0 to {self.vocab_size - 1}")

    def _validate_shapes(self) -> None:
        heads, key_value_heads = self.num_attention_heads, self.num_key_value_heads
        divides = self.hidden_size % heads == 0
        self._require("hidden_size", divides, f"a multiple of num_attention_heads={heads}")
        divides = heads % key_value_heads == 0
        self._require("num_key_value_heads", divides, f"a divisor of num_attention_heads={heads}")
        if self.position_embedding == "rope":
            self._require("hidden_size", self.head_dim % 2 == 0, f"an even number per head (of {heads}) for rope")

    def _require_integer(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        self._require(name, _is_integer(value) and value >= minimum, f"an integer of at least {minimum}")

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ValueError(f"GolfConfig: {name}={getattr(self, name)!r} is not allowed; it must be {allowed}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _is_positive_number(value: Any) -> bool:
    return _is_number(value) and 0 < value < float("inf")
