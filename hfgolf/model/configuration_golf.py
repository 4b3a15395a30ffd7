"""The architecture of a Golf model: one validated config field per choice.

Owns the names, defaults and allowed values. Knows nothing about weights or computation. Saving a model copies this
file and layers_golf.py next to the weights, so it imports only transformers and that.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .layers_golf import ACTIVATIONS

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "position_embedding": ("rope", "learned", "none"),
    "activation": (*ACTIVATIONS, "leaky_relu2"),  # the one with a number of its own, its slope
    "matrix_init": ("normal", "uniform", "orthogonal"),
    "unet_skips": (None, "add", "gated"),
    "attention_span": ("stream", "document"),
    "soft_cap_form": ("tanh", "poly5"),
}
# Fields whose own check is below, or that transformers checks.
_CHECKED_ONE_BY_ONE = {
    *("dropout", "attention_dropout", "activation_slope", "exclude_self_value", "value_embedding_layers", "rope_dims"),
    *("parallel_from", "loop", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id", *_CHOICES),
}
MAX_LAYERS = 1000  # as in the section model; a foreign model or artifact with a billion would be built for hours

SWITCHES = (
    *("norm_weight", "query_gain", "branch_scale", "embedding_residual", "unet_skips", "rope_dims", "norm_depth_scale"),
    *("exclude_self_value", "parallel_from", "loop", "head_gate", "smear_gate", "attention_span", "bigram_buckets"),
    *("value_embedding_layers", "embedding_size"),
)
"""The fields that turn on what only golf models have; off by default. The other fields of golf depend on these."""

_AUTO_MAP = {
    "AutoConfig": "configuration_golf.GolfConfig",
    "AutoModel": "modeling_golf.GolfModel",
    "AutoModelForCausalLM": "modeling_golf.GolfForCausalLM",
    "AutoModelForSequenceClassification": "modeling_golf.GolfForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_golf.GolfForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_golf.GolfForQuestionAnswering",
}


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
        rope_parameters: RoPE for more positions than a model was trained on, as transformers' models have it:
            {"rope_type": "linear" | "yarn", "factor": ...}. It may also set rope_theta. Without a factor it is empty.
        norm_eps: added to the mean square (variance, for LayerNorm) in every norm.
        initializer_range: initial standard deviation of the input matrices and of untied embeddings.
            None: 0.5 / sqrt(fan-in) for matrices and 0.02 for embeddings.
        use_cache: cache keys and values during generation.

    The rest is off by default. x is the residual stream, e the embedding, n a norm, sigmoid written s():

        norm_weight: false: norms without weights, RMS and per-head ones included.
        query_gain: multiply each query head by a learned number after RoPE; its first value. None: no gain.
        branch_scale: multiply the outputs of attention and MLP by learned vectors of C, first 1.
        embedding_residual: begin each block with x = a x + b x0; x0: the first block's input; vectors, first 1 and 0.
        unet_skips: the first half of the passes through a block store their outputs, the second half takes them up,
            last first. "add": x + v skip; "gated": g x + (1 - g) (v skip), g = s(u). Vectors, first v = 1 and u = 0.
        tied_embedding_std: initial standard deviation of a tied embedding. None: 1 / C.
        matrix_init: of the input matrices: "normal" | "uniform" in +-1 / sqrt(fan-in) | "orthogonal" with gain 1 (of
            q, k and v one by one).
        activation: also "leaky_relu2": leaky_relu(x, activation_slope)^2.
        rope_dims: rotate only the first dimensions of a head. None: all.
        norm_depth_scale: multiply the outputs of the norms of layer i = 0, 1, ... by 1 / sqrt(i + 1).
        exclude_self_value: in the last n layers ("all"), remove from a head's output y its part along the token's own
            value: y - (y . v) v / |v|^2, with v of the head's group.
        parallel_from: from this layer on, attention and MLP read the same input: x + attention(n(x)) + mlp(n(x)).
        lanes: from parallel_from on there are two streams, first equal. Attention reads lane 0 (mixed with x0 if
            embedding_residual), the MLP reads lane 1. Both lanes become r lane + p attention + q mlp, with their own
            three numbers per layer, first 1.1, 1, 1. Skips go into lane 0, and the final norm gets the mean.
        loop: [first, last, times]: a pass runs these layers so many times in a row, with the same weights.
        loop_active: whether it does. Training may begin without (schedule.loop_start of hfgolf).
        head_gate: multiply each head's output by peak * s(scale * g . z), z the first head_gate dimensions of
            attention's input, g a vector per head, first 0. head_gate_scale, head_gate_peak: these two numbers.
        smear_gate: before the embedding's norm, e_t + m s(w . e_t[:smear_gate]) e_(t-1); m and w first 0. A separator
            (bos_token_id) gets nothing from the document before it.
        attention_span: "stream" | "document": a token attends only to its own document, which bos_token_id begins.
        bigram_buckets, bigram_size: add a hashed embedding of the last two tokens (see GolfBigram).
        value_embedding_layers, value_embedding_size: in the last n layers, add to the values 0.1 * r * P t, with t the
            token's row in a shared table (std 0.01), P a shared projection (first 0), r a number per layer (first 1).
        embedding_size: factor the embedding into (V, E) and (C, E), and the head into (E, C) and (V, E). None: C.
        soft_cap_form: "tanh" | "poly5", cap * p(clip(z / cap, -2, 2)) with p(x) = x (1 - x^2/3 + x^4/15), clipped to
            [-1, 1]. logit_soft_cap_negative: the cap of logits below 0. None: the same.

    Raises:
        ValueError: a field has the wrong type or value. The message names the field, its value and what is allowed.
    """

    model_type = "golf"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]  # Trainer appends to a list
    attribute_map: ClassVar[dict[str, str]] = {"hidden_act": "activation", "rms_norm_eps": "norm_eps"}
    _auto_class: ClassVar[str | None] = "AutoConfig"  # makes save_pretrained ship this file

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
    rope_parameters: dict[str, Any] = None  # type: ignore[assignment]  # None only until __post_init__
    norm_eps: float = 1e-6
    initializer_range: float | None = None
    use_cache: bool = True
    norm_weight: bool = True
    query_gain: float | None = None
    branch_scale: bool = False
    embedding_residual: bool = False
    unet_skips: str | None = None
    tied_embedding_std: float | None = None
    matrix_init: str = "normal"
    activation_slope: float = 0.5
    rope_dims: int | None = None
    norm_depth_scale: bool = False
    exclude_self_value: int = 0
    parallel_from: int | None = None
    lanes: bool = False
    loop: list[int] | None = None
    loop_active: bool = True
    head_gate: int | None = None
    head_gate_scale: float = 1.0
    head_gate_peak: float = 1.0
    smear_gate: int | None = None
    attention_span: str = "stream"
    bigram_buckets: int | None = None
    bigram_size: int = 112
    value_embedding_layers: int = 0
    value_embedding_size: int = 128
    embedding_size: int | None = None
    soft_cap_form: str = "tanh"
    logit_soft_cap_negative: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for alias in self.attribute_map.keys() & kwargs.keys():
            setattr(self, alias, kwargs.pop(alias))
        self.rope_parameters = kwargs.pop("rope_scaling", None) or self.rope_parameters
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._require_integer("hidden_size", 1)  # before the multiplication below
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.exclude_self_value == "all":
            self.exclude_self_value = self.num_hidden_layers
        self.settle_rope()
        self._validate_fields()
        self._validate_shapes()
        self._validate_switches()
        if self.switch_that_reads_ids not in (None, "value_embedding_layers"):
            self.use_cache = False  # a KV cache does not keep the earlier ids
        super().__post_init__(**kwargs)
        self.settle_rope()  # transformers completes it

    def settle_rope(self) -> None:
        """Take rope_theta from rope_parameters, and check the rest; GolfModel does again, if they were set since.

        Raises ValueError for what Golf does not do.
        """
        given: Any = self.rope_parameters or {}
        rope = dict(given) if isinstance(given, dict) else {"rope_type": given}
        kind: Any = rope.pop("type", "default")
        kind, factor = rope.pop("rope_type", kind), rope.get("factor", 0)
        is_plain = kind == "default" and rope.get("partial_rotary_factor", 1) == 1
        is_scaled = kind in ("linear", "yarn") and _is_number(factor) and factor >= 1
        is_scaled = is_scaled and self.position_embedding == "rope" and self.rope_dims is None
        allowed = '{"rope_type": "linear" or "yarn", "factor": a number of at least 1}, or {"rope_type": "default"}'
        allowed += '; with position_embedding="rope", and without rope_dims'
        self._require("rope_parameters", is_plain or is_scaled, allowed)
        self.rope_theta = rope.get("rope_theta", self.rope_theta)
        self.rope_parameters = {} if is_plain else {"rope_type": kind, "rope_theta": self.rope_theta} | rope

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save config.json with all classes of an auto_map. transformers would name only the class that is saved."""
        self.auto_map = dict(_AUTO_MAP)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @property
    def head_dim(self) -> int:
        """Return the size of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def fused_rows(self) -> tuple[int, ...]:
        """Return the row counts of the three matrices in a qkv projection: (H * D, K * D, K * D)."""
        heads = (self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads)
        return tuple(count * self.head_dim for count in heads)

    @property
    def switch_that_reads_ids(self) -> str | None:
        """Return the name of a switch that needs token ids, not only embeddings; first those that need earlier ids."""
        is_on = {
            "attention_span": self.attention_span == "document",
            "smear_gate": self.smear_gate,
            "bigram_buckets": self.bigram_buckets,
            "value_embedding_layers": self.value_embedding_layers,
        }
        return next((name for name, value in is_on.items() if value), None)

    def _validate_fields(self) -> None:
        # transformers does not check the field types of a subclass: the string '64' would fail far from here
        for name, kind in GolfConfig.__annotations__.items():
            value = getattr(self, name)
            if name in _CHECKED_ONE_BY_ONE or "ClassVar" in kind or (value is None and kind.endswith("None")):
                continue
            if kind == "bool":
                self._require(name, isinstance(value, bool), "true or false")
            elif kind.startswith("int"):
                self._require_integer(name, 1, MAX_LAYERS if name == "num_hidden_layers" else None)
            else:
                none = ", or None" if kind.endswith("None") else ""
                self._require(name, _is_number(value) and 0 < value < float("inf"), f"a number above 0{none}")
        for name, allowed in _CHOICES.items():
            self._require(name, getattr(self, name) in allowed, "one of " + ", ".join(map(str, allowed)))
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

    def _validate_switches(self) -> None:
        layers, head_dim, width = self.num_hidden_layers, self.head_dim, self.hidden_size
        slope = self.activation_slope
        self._require("activation_slope", _is_number(slope) and 0 <= slope <= 1, "a number from 0 to 1")
        for name in ("exclude_self_value", "value_embedding_layers"):
            self._require_integer(name, 0, layers)
        for name in ("head_gate", "smear_gate"):
            if getattr(self, name) is not None:
                self._require_integer(name, 1, width)
        if self.bigram_buckets is not None:
            self._require_integer("bigram_buckets", 2)
        if self.rope_dims is not None:
            self._require_integer("rope_dims", 2, head_dim)
            allowed = self.rope_dims % 2 == 0 and self.position_embedding == "rope"
            self._require("rope_dims", allowed, 'an even number, with position_embedding="rope"')
        if self.parallel_from is not None:
            self._require_integer("parallel_from", 0, layers - 1)
        self._require("lanes", not self.lanes or self.parallel_from is not None, "false without parallel_from")
        caps = self.logit_soft_cap_negative is None and self.soft_cap_form == "tanh"
        self._require("logit_soft_cap", caps or self.logit_soft_cap is not None, "a number, because other caps are set")
        tied = self.tie_word_embeddings or self.tied_embedding_std is None
        self._require("tied_embedding_std", tied, "None without tie_word_embeddings")
        if self.loop is not None:
            loop: Any = self.loop
            end = self.parallel_from if self.lanes and self.parallel_from is not None else layers
            numbers = isinstance(loop, list | tuple) and len(loop) == 3 and all(map(_is_integer, loop))
            allowed = numbers and 0 <= loop[0] <= loop[1] < end and 2 <= loop[2] <= MAX_LAYERS
            last = f"layers from 0 to {end - 1}" + (" (below parallel_from)" if self.lanes else "")
            self._require("loop", allowed, f"None, or [first, last, times] with {last} and 2 to {MAX_LAYERS} times")
            self.loop = list(loop)

    def _require_integer(self, name: str, minimum: int, maximum: int | None = None) -> None:
        value = getattr(self, name)
        allowed = f"an integer of at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")
        is_allowed = _is_integer(value) and value >= minimum and (maximum is None or value <= maximum)
        self._require(name, is_allowed, allowed)

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; allowed: {allowed}.")


MODEL_FIELDS: dict[str, Any] = {
    name: getattr(GolfConfig, name)
    for name, kind in GolfConfig.__annotations__.items()
    if "ClassVar" not in str(kind)
    and name not in ("use_cache", "loop_active", "bos_token_id", "eos_token_id", "pad_token_id")
} | {"rope_parameters": {}}
"""{field that says which model it is: its default}. The other fields are of a run or a tokenizer."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)
