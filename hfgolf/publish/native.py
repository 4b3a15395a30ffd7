"""Golf models as architectures of transformers, and back: the same logits, without code of our own.

Owns the table that says which class of transformers computes exactly what a Golf config does, under which names, and
the comparison of logits that comes with each conversion. Does not know folders, cards or the Hub.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ApertusForCausalLM,
    ArceeForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    NanoChatForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Starcoder2ForCausalLM,
)

from hfgolf.config.sections import model_key
from hfgolf.model.configuration_golf import MODEL_FIELDS, GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words

TOLERANCE = 1e-5  # of the largest logit: what fp32 sums in another order differ by
_NO_POSITIONS = 1e30  # a factor that RoPE's angles are divided by: they stand in for no positions
_ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu", "gelu_new": "gelu_new", "silu": "silu", "swiglu": "silu"}
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
_EITHER = (False, True)
_UNGATED = ("relu2", "gelu", "gelu_new", "silu")
_BIASES = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that every architecture takes over under the same name.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "attention_dropout"),
    *_TOKEN_IDS,
)
# Fields that do not change what a trained model computes, or that the code below treats one by one.
_FREE = {
    *_SHARED,
    *("rope_theta", "rope_parameters", "norm_eps", "tie_word_embeddings"),
    *("dropout", "use_cache", "initializer_range", "tied_embedding_std", "matrix_init"),
}
_KEPT = (*MODEL_FIELDS, "pad_token_id")  # of a Golf model, in the native config, where they differ
_OF_THE_TABLE = {"embedding_norm", "tie_word_embeddings"}
_TRANSLATED = {*_BIASES, *_TOKEN_IDS, "use_bias", "hidden_act", "activation_function"}
# Fields of a native config without an effect on its logits, or that are taken over whatever they are.
_COSMETIC = {
    *PreTrainedConfig().to_dict(),
    *("use_cache", "initializer_range", "pretraining_tp", "max_window_layers", "n_inner", "reorder_and_upcast_attn"),
    *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
}


@dataclass(frozen=True)
class Architecture:
    """One row of the table: a class of transformers, and the Golf configs that it computes."""

    model: Any
    options: dict[str, tuple[Any, ...]]
    """The values it has for a Golf field; ... means any number. A field that is neither here nor in _FREE must have its
    default, so that a new switch is refused until somebody proves otherwise."""
    fields: dict[str, str]
    """Its own config fields, and the Golf fields they are."""
    names: dict[str, str] = field(default_factory=dict)
    """Parts of Golf's parameter names, and its own."""

    @property
    def name(self) -> str:
        return str(self.model.__name__).removesuffix("ForCausalLM").removesuffix("LMHeadModel")

    @property
    def is_gpt2(self) -> bool:
        return self.model is GPT2LMHeadModel

    @property
    def folds_embedding_norm(self) -> bool:
        return "embedding_norm" in self.options  # otherwise it has one

    @property
    def activation(self) -> str:
        return "activation_function" if self.is_gpt2 else "hidden_act"


_RMS: dict[str, tuple[Any, ...]] = {
    "position_embedding": ("rope", "none"),
    "norm_weight": _EITHER,
    "embedding_norm": _EITHER,
}
_LAYERNORM: dict[str, tuple[Any, ...]] = {
    "norm": ("layernorm",),
    "qk_norm": (False,),
    "norm_weight": _EITHER,
    "activation": _UNGATED,
    "use_bias": _EITHER,
}
_SAME = dict(zip(_SHARED, _SHARED, strict=True))
_RMS_FIELDS = _SAME | {"rms_norm_eps": "norm_eps"}

# The first row that fits is taken.
ARCHITECTURES = (
    Architecture(
        ApertusForCausalLM,
        _RMS | {"activation": _UNGATED},
        _RMS_FIELDS,
        {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    ),
    Architecture(Qwen3ForCausalLM, _RMS | {"activation": ("swiglu",)}, _RMS_FIELDS | {"head_dim": "head_dim"}),
    Architecture(
        ArceeForCausalLM,
        _RMS | {"activation": _UNGATED, "qk_norm": (False,), "use_bias": _EITHER},
        _RMS_FIELDS | _BIASES,
    ),
    Architecture(
        LlamaForCausalLM,
        _RMS | {"activation": ("swiglu",), "qk_norm": (False,), "use_bias": _EITHER},
        _RMS_FIELDS | _BIASES,
    ),
    Architecture(
        NanoChatForCausalLM,
        {"position_embedding": ("rope", "none"), "activation": _UNGATED, "norm_weight": (False,)}
        | {"logit_soft_cap": (...,)},
        _RMS_FIELDS | {"final_logit_softcapping": "logit_soft_cap"},
        {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    ),
    Architecture(
        Starcoder2ForCausalLM,
        _LAYERNORM | {"position_embedding": ("rope", "none"), "embedding_norm": _EITHER},
        _SAME
        | {"norm_epsilon": "norm_eps", "use_bias": "use_bias"}
        | {"embedding_dropout": "dropout", "residual_dropout": "dropout"},
        {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    ),
    Architecture(
        GPT2LMHeadModel,
        _LAYERNORM | {"position_embedding": ("learned",), "embedding_norm": (False,)},
        {name: name for name in ("vocab_size", *_TOKEN_IDS)}
        | {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
        | {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
        | {"layer_norm_epsilon": "norm_eps", "attn_pdrop": "attention_dropout"}
        | {"embd_pdrop": "dropout", "resid_pdrop": "dropout"},
        {"model": "transformer", "layers": "h", "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
        | {"input_layernorm": "ln_1", "self_attn.qkv_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj"}
        | {"post_attention_layernorm": "ln_2", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    ),
)


def find_architecture(config: GolfConfig) -> Architecture:
    """Return the first architecture that computes what a Golf model with this config does.

    Raises UserError if there is none. It names the closest ones and the fields in which they differ.
    """
    misfits = [(row, _misfits(config, row)) for row in ARCHITECTURES]
    fewest = min(len(found) for _, found in misfits)
    closest = [(row, found) for row, found in misfits if len(found) == fewest]
    if fewest == 0:
        return closest[0][0]
    ways = [f"{row.name} needs {join_words(found, maximum=4)}" for row, found in closest]
    raise UserError(
        f"no architecture of transformers computes this model. The closest: {'; '.join(ways)}."
        " Train with that, or export it as Golf."
    )


def has_native(model: PreTrainedModel) -> bool:
    """Return whether some architecture computes what a Golf model does."""
    return isinstance(model, GolfForCausalLM) and not all(_misfits(model.config, row) for row in ARCHITECTURES)


def _misfits(config: GolfConfig, row: Architecture) -> list[str]:
    """Return each field whose value an architecture does not have, with what it has instead."""
    found = []
    for name, default in MODEL_FIELDS.items():
        if name == "activation_slope" or (name in _FREE and name not in row.options):
            continue  # the slope does nothing without leaky_relu2, which no row has
        value, allowed = getattr(config, name), row.options.get(name, (default,))
        if value not in allowed and not (... in allowed and value is not None):
            choices = " or ".join("a number" if known is ... else _said(known) for known in allowed)
            found.append(f"{model_key(name)} {choices} (now {_said(value)})")
    if row.is_gpt2 and config.num_key_value_heads != config.num_attention_heads:
        found.append(f"model.num_key_value_heads {config.num_attention_heads} (now {config.num_key_value_heads})")
    return found


def _said(value: Any) -> str:
    return json.dumps(value).strip('"')  # as in YAML


@torch.no_grad()
def to_native(golf: GolfForCausalLM) -> PreTrainedModel:
    """Return the same model in transformers' own classes, with equal logits and dtype, in evaluation mode.

    Its config says under `golf` what else the Golf model was, so that `from_native` can return exactly that.

    Raises UserError if transformers has no such architecture.
    """
    config = golf.config
    row = find_architecture(config)
    with torch.random.fork_rng([]):  # a run may draw more numbers
        native = row.model(_native_config(config, row, golf.dtype)).eval()
    nn.Module.to(native, device=golf.device, dtype=golf.dtype)
    state: dict[str, Tensor] = {}
    for name, tensor in golf.state_dict().items():
        parts = _parts(name, row)
        pieces = tensor.split(config.fused_rows) if len(parts) > 1 else [tensor]
        state |= {_renamed(part, row.names): piece for part, piece in zip(parts, pieces, strict=True)}
    # the embedding's norm depends on the token alone, so it folds into the table; a tied head keeps the raw one
    is_folded = config.embedding_norm and row.folds_embedding_norm
    if is_folded:
        state["model.embed_tokens.weight"] = golf.model.embed_norm(state["model.embed_tokens.weight"])
    kept = {name: tensor for name, tensor in state.items() if "embed_norm" not in name}
    state = {name: _oriented(name, tensor, row, config.head_dim) for name, tensor in kept.items()}
    for name, tensor in native.state_dict().items():
        # zero biases stand in for none, and norm weights of one for norms without weights
        if name not in state and name.endswith(("bias", "norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
            state[name] = torch.full_like(tensor, float(name.endswith("weight")))
    native.load_state_dict(state)
    plain = golf_shape(native.config)
    made_from = {key: getattr(config, key) for key in _KEPT if getattr(config, key) != getattr(plain, key)}
    has_bias = is_folded and getattr(golf.model.embed_norm, "bias", None) is not None
    if has_bias or (is_folded and not config.tie_word_embeddings):  # the table does not tell what it was
        made_from = {key: value for key, value in made_from.items() if key not in _OF_THE_TABLE}
    native.config.golf = made_from
    return native


@torch.no_grad()
def from_native(native: PreTrainedModel) -> GolfForCausalLM:
    """Return the Golf model with the logits and dtype of a native one, in evaluation mode.

    A model that `to_native` made becomes the one it was, weights included. If it was trained since, or if it was never
    Golf, its embedding has no norm.

    Raises UserError if the table does not have its architecture, or Golf lacks one of its options.
    """
    row = _row(type(native))
    state = native.state_dict()
    if getattr(native.config, row.activation) == "xielu":
        _require_squared_relu(row, state)
    try:
        return _from_native(native, row, state)
    except UserError:
        if not _made_from(native.config):
            raise
    return _from_native(native, row, state, is_as_made=False)


def as_trained(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Golf model from which a native one was made; any other, or one that was trained since, as it is."""
    made_from = _made_from(model.config)
    if made_from is None:
        return model
    try:
        golf = from_native(model)
    except UserError:
        return model
    golf.name_or_path = model.name_or_path
    is_as_made = all(getattr(golf.config, key, ...) == value for key, value in made_from.items())  # ...: a newer field
    return golf if is_as_made else model


def _from_native(
    native: PreTrainedModel, row: Architecture, state: dict[str, Tensor], is_as_made: bool = True
) -> GolfForCausalLM:
    has_biases = row.is_gpt2 or any(tensor.any() for name, tensor in state.items() if name.endswith("bias"))
    config = _golf_config(native.config, row, has_biases, is_as_made)
    with torch.random.fork_rng([]):
        golf = GolfForCausalLM(config).eval()
    nn.Module.to(golf, device=native.device, dtype=native.dtype)
    back = {theirs: ours for ours, theirs in row.names.items()}
    state = {
        _renamed(name, back): _oriented(name, tensor, row, config.head_dim)
        for name, tensor in state.items()
        if "act_fn" not in name
    }
    if config.embedding_norm and row.folds_embedding_norm:
        table, state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"], state["lm_head.weight"]
        state |= _unfolded(golf.model.embed_norm, table, state["lm_head.weight"])
    for name, tensor in golf.state_dict().items():
        source = [state.pop(part) for part in _parts(name, row) if part in state]
        if not source and not name.endswith("bias"):
            raise UserError(f"{row.name}: there is no {name}.")
        tensor.copy_(torch.cat(source) if source else torch.zeros_like(tensor))
    # norm weights of one stand in for norms without weights
    stand_in = {name for name, tensor in state.items() if not config.norm_weight and name.endswith("norm.weight")}
    left = [name for name, tensor in state.items() if (tensor - float(name in stand_in)).any()]
    if left:
        raise UserError(f"{row.name}: Golf has nothing like {join_words(left, maximum=3)}.")
    return golf


def _unfolded(norm: Any, table: Tensor, head: Tensor) -> dict[str, Tensor]:
    """Return the weights (C) of the norm that makes a table (V, C) of the head (V, C), under their name.

    Raises UserError if no norm does, because table or head were trained since.
    """
    weight, found = norm.weight, {}
    if weight is not None:
        normed = norm(head)  # a new norm has weights of one
        largest = normed.abs().argmax(0, keepdim=True)
        quotient = (table.gather(0, largest) / normed.gather(0, largest))[0].nan_to_num(1.0)
        up = torch.full_like(quotient, math.inf)
        # a quotient of rounded numbers may be a neighbor of the weight that was there
        choices = torch.stack([quotient, quotient.nextafter(up), quotient.nextafter(-up)])
        misses = torch.stack([(normed * choice != table).sum(0) for choice in choices])
        best = misses.argmin(0, keepdim=True)
        found["model.embed_norm.weight"] = choices.gather(0, best)[0]
        weight.copy_(found["model.embed_norm.weight"])
    apart = (norm(head) - table).abs().max()
    if not apart <= 8 * torch.finfo(table.dtype).eps * table.abs().max():
        raise UserError("its table was trained since hfgolf exported it; it is no longer the norm of its head.")
    return found


@torch.no_grad()
def compare(one: PreTrainedModel, other: PreTrainedModel, real_ids: list[int]) -> tuple[float, float, int]:
    """Return how far the logits of two models are apart, the largest logit, and on how many tokens, random and real."""
    config: Any = one.config
    length = min(128, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(config.vocab_size, (2, length), generator=generator)]
    rows += [torch.tensor([real_ids[:length]])] if real_ids else []
    rows += [torch.tensor([real_ids[-length:]])] if len(real_ids) > length else []
    largest = largest_logit = 0.0
    for ids in rows:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # no id of these is padding
        expected, actual = (
            model(**{key: value.to(model.device) for key, value in inputs.items()}).logits.cpu()
            for model in (one, other)
        )
        apart = (expected - actual).abs().max().item()
        largest = apart if math.isnan(apart) else max(largest, apart)
        largest_logit = max(largest_logit, expected.abs().max().item())
    return largest, largest_logit, sum(ids.numel() for ids in rows)


def converted(model: PreTrainedModel, to: str, real_ids: list[int]) -> tuple[PreTrainedModel, str]:
    """Return a model as "native" or "golf", on the CPU, and a sentence that says what it is and how exact.

    real_ids: of a text that the model may be asked about. Converts and compares in fp32, and returns the model's dtype.

    Raises UserError if it cannot be converted, or if the logits differ by more than rounding.
    """
    if isinstance(model, GolfForCausalLM) == (to == "golf"):
        return model, f"{type(model).__name__}, as it was"
    dtype, device = model.dtype, model.device
    model = nn.Module.to(model, device="cpu", dtype=torch.float32)
    result = to_native(model) if isinstance(model, GolfForCausalLM) else from_native(model)
    apart, largest_logit, num_tokens = compare(model, result, real_ids)
    nn.Module.to(model, device=device, dtype=dtype)
    if not apart <= TOLERANCE * max(1.0, largest_logit):  # or NaN
        raise UserError(
            f"{type(result).__name__} has other logits than {type(model).__name__}: they differ by"
            f" {apart:.2g}, and the largest is {largest_logit:.2g}; nothing was converted."
        )
    folded = to == "native" and model.config.embedding_norm and not isinstance(result, NanoChatForCausalLM)
    added = ", its embedding's norm folded into the table" if folded else ""
    if folded and model.config.tie_word_embeddings:
        added += f", which unties it: {result.num_parameters():,} parameters instead of {model.num_parameters():,}"
    rates = ("residual_dropout", "resid_pdrop")
    if to == "native" and model.config.dropout and not any(getattr(result.config, rate, 0) for rate in rates):
        added += ", without its dropout for further training"
    sentence = (
        f"{type(result).__name__}{added}: logits within {apart:.1e} of {type(model).__name__}'s"
        f" on {num_tokens} tokens, random and real"
    )
    return nn.Module.to(result, dtype=dtype), sentence


# xIELU (Huang et al. 2024, arXiv:2411.13010) is squared ReLU if softplus(alpha_p) = 1 and softplus(alpha_n) = 0: here
# exactly, in fp32 and in bf16. At -100, the latter would be a denormal number, and those are slow on a CPU. GGUF files
# have these, and native models that hfgolf once wrote. It no longer does: beta is a constant of 0.5 to the CUDA kernel
# that transformers suggests at each load, which then writes wrong text.
XIELU_OF_RELU2 = {"alpha_p": math.log(math.e - 1), "alpha_n": -200.0, "beta": 0.0, "eps": -1e-6}


def _native_config(config: GolfConfig, row: Architecture, dtype: torch.dtype) -> PreTrainedConfig:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta} | config.rope_parameters
    if config.position_embedding == "none":
        rope |= {"rope_type": "linear", "factor": _NO_POSITIONS}
    values: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in row.fields.items()}
    values[row.activation] = _ACTIVATIONS[config.activation]
    values |= {} if row.is_gpt2 else {"rope_parameters": rope}
    values["pad_token_id"] = None  # its embedding gets no gradient, and here it would be that of the end of a text
    native: PreTrainedConfig = row.model.config_class(
        tie_word_embeddings=config.tie_word_embeddings and not (config.embedding_norm and row.folds_embedding_norm),
        initializer_range=config.initializer_range or 0.02,
        dtype=dtype,
        **values,
    )
    return native


def golf_shape(config: PreTrainedConfig) -> GolfConfig:
    """Return the config of the Golf model that computes what a native one does, without a look at its weights.

    If `to_native` made it, that of the model it was.

    Raises UserError like `from_native`. If the architecture has biases, so has the Golf model, even if all are zero.
    """
    if isinstance(config, GolfConfig):
        return config
    row = _row(next((row.model for row in ARCHITECTURES if type(config) is row.model.config_class), type(config)))
    with torch.device("meta"):
        names = [name for name, _ in row.model(config).named_parameters()]
    return _golf_config(config, row, any(name.endswith("bias") for name in names))


def _row(model: type) -> Architecture:
    """Return the row of a class of transformers. Raises UserError if the table does not have it."""
    row = next((row for row in ARCHITECTURES if model is row.model), None)
    if row is None:
        names = join_words([row.name for row in ARCHITECTURES])
        raise UserError(f"{model.__name__} cannot become a Golf model; these can: {names}.")
    return row


def _made_from(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return what a native config says of the Golf model that it was made from; None if it was made from none."""
    made_from = getattr(config, "golf", None)
    return made_from if isinstance(made_from, dict) else None


def _golf_config(theirs: Any, row: Architecture, has_biases: bool, is_as_made: bool = True) -> GolfConfig:
    """Return the config of a native config's Golf model. Raises UserError if Golf lacks one of its options."""
    values = {name: allowed[0] for name, allowed in row.options.items() if len(allowed) == 1}
    values |= {ours: getattr(theirs, name) for name, ours in row.fields.items() if ours != "head_dim"}
    for name in _TOKEN_IDS:  # GPT2Config says 50,256 whatever the vocabulary is; such an id stands for nothing
        ids = values[name] if isinstance(values[name], list) else [values[name]]
        if any(token_id is not None and not 0 <= token_id < theirs.vocab_size for token_id in ids):
            values[name] = None
    values["embedding_norm"] = not row.folds_embedding_norm
    if "use_bias" in row.options:
        values["use_bias"] = has_biases
    if not row.is_gpt2:
        rope = theirs.rope_parameters
        has_none = rope.get("rope_type") == "linear" and rope.get("factor", 1.0) >= _NO_POSITIONS
        values |= {"position_embedding": "none" if has_none else "rope", "rope_theta": rope["rope_theta"]}
        values |= {} if has_none else {"rope_parameters": rope}
    activation = getattr(theirs, row.activation)
    if values.get("activation") != "swiglu":
        known = "relu2" if activation == "xielu" else _SAME_ACTIVATION.get(activation, activation)
        if known not in _UNGATED:
            raise UserError(f"{row.name}: {row.activation} {activation} is not one of Golf's: {', '.join(_UNGATED)}.")
        values["activation"] = known
    values["tie_word_embeddings"] = theirs.tie_word_embeddings
    made_from = (is_as_made and _made_from(theirs)) or {}
    values |= {name: value for name, value in made_from.items() if name in _KEPT}
    try:
        config = GolfConfig(**values)
    except ValueError as error:
        raise UserError(f"{row.name}: {error}") from None
    _require_same(theirs, _native_config(config, row, theirs.dtype))
    if made_from and (misfits := _misfits(config, row)):  # somebody wrote it by hand
        raise UserError(f"{row.name} needs {join_words(misfits, maximum=4)}.")
    return config


def _require_squared_relu(row: Architecture, state: dict[str, Tensor]) -> None:
    """Raise UserError if the constants of xIELU are not those with which it is squared ReLU."""
    for key in (key for key in state if "act_fn" in key and not key.endswith("eps")):
        name = key.rpartition(".")[2]
        wanted = torch.full_like(state[key], XIELU_OF_RELU2[name])
        # hfgolf once wrote an alpha_n of -100
        if torch.allclose(state[key], wanted) or (name == "alpha_n" and (state[key] <= -100).all()):
            continue
        raise UserError(f"{row.name}: its xIELU was trained; Golf has only the one that is squared ReLU.")


def _require_same(theirs: PreTrainedConfig, ours: PreTrainedConfig) -> None:
    """Raise UserError if a config says more than what Golf has, by what its Golf config would become."""
    found, expected = theirs.to_dict(), ours.to_dict()
    for name in (found.keys() & expected.keys()) - _COSMETIC - _TRANSLATED:
        if found[name] != expected[name]:
            raise UserError(
                f"{type(theirs).__name__}: {name} is {found[name]!r}; Golf has only {expected[name]!r} for it."
            )


def _renamed(name: str, names: dict[str, str]) -> str:
    name = f".{name}"
    for old, new in names.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:]


def _parts(name: str, row: Architecture) -> list[str]:
    """Return the names of the tensors that are one in Golf: q, k and v."""
    is_fused = "qkv_proj" in name and not row.is_gpt2
    return [name.replace("qkv_proj", f"{part}_proj") for part in "qkv"] if is_fused else [name]


def _oriented(native_name: str, tensor: Tensor, row: Architecture, head_dim: int) -> Tensor:
    """Return a tensor as the other side stores it.

    GPT-2 has the matrices of its blocks as (in, out), NanoChat the halves of a head's queries and keys the other way.
    """
    if row.model is NanoChatForCausalLM and ("q_proj" in native_name or "k_proj" in native_name):
        return tensor.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)
    return tensor.mT if row.is_gpt2 and ".h." in native_name and tensor.ndim == 2 else tensor
