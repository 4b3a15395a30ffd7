"""The Golf transformer in transformers: initialization, masks and caches, the chunked loss and generation.

The layers and the pass over them are in layers_golf.py. Knows nothing about data, optimizers or training loops. Saving
a model copies both files next to the weights, so they must run with only torch and transformers installed.

Shapes: B batch, T time (queries), H heads, K key-value heads, D head size, C channels, V vocabulary, N = B * T rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import capture_outputs

from .configuration_golf import GolfConfig
from .layers_golf import (
    FusedLinear,
    GolfAttention,
    GolfBigram,
    GolfBlock,
    GolfRMSNorm,
    GolfStack,
    GolfValueEmbedding,
    OutputLinear,
    Rotation,
    apply_dropout,
    cap_logits,
    cos_and_sin,
    document_numbers,
    layer_order,
    soft_caps,
    squash,
)

IGNORE_INDEX = -100
# The KV cache in arguments and outputs: transformers 5.24 renamed past_key_values to cache.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
# What reaches attention kernels and paged caches through **kwargs, and what a classifier's loss or the recorder of
# outputs reads on the way. max_seqlen_* is what max_length_* was until 5.18.
PASSED_ON = {
    *("cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q", "max_seqlen_k", "max_seqlen_q"),
    *("block_table", "logits_indices", "logits_processor_args", "read_index", "write_index"),
    *("num_items_in_batch", "output_attentions", "output_hidden_states"),
}
# Attention that is causal by itself. transformers knows, but 5.17 gives it a mask if compiled: no flash kernel then.
NEED_NO_MASK = ("sdpa", "causal_blocks")
# Logits per chunk of the loss. CPU: 64 MiB in fp32, the fastest size measured at V = 50,257. Accelerators: 256 MiB,
# unless GolfForCausalLM.chunk_elements says more. A chunk needs at least about C rows: with fewer, updating the (V, C)
# weight gradient costs as much as its matmuls.
CHUNK_ELEMENTS_CPU = 2**24
CHUNK_ELEMENTS_ACCELERATOR = 2**26
# Rows per chunk in fp16: a gradient sums one number of at most |hidden| per row, and fp16 ends at 65,504.
MAX_ROWS_FP16 = 2**14
# Where the parameters start that are neither matrices nor norms, by name. query_gain starts at the config's number.
_STARTS: dict[str, Any] = {
    "attention_scale": 1.0,
    "mlp_scale": 1.0,
    "residual_mix": [[1.0], [0.0]],
    "skip_scale": 1.0,
    "skip_gate": 0.0,
    "lane_mix": [1.1, 1.0, 1.0],
    "head_gate": 0.0,
    "value_embedding_scale": 1.0,
    "gate": 0.0,  # of the smear
    "strength": 0.0,
    "scale": 0.05,  # of the bigrams
}


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention with plain matmuls: the readable reference, and the only kernel that returns its weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    weights = apply_dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def _takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward take its KV cache by the older name as well."""
    return forward if CACHE == "past_key_values" else deprecate_kwarg("past_key_values", "5.40.0", CACHE)(forward)


class GolfDecoderLayer(GradientCheckpointingLayer, GolfBlock):
    """A block that can recompute its activations in the backward pass."""


class GolfPreTrainedModel(PreTrainedModel):
    """Weight initialization, and the capabilities the model declares to transformers."""

    config_class = GolfConfig
    config: GolfConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GolfDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    # vLLM brings its own cache and head: bigrams, loops and poly5, for example, would write wrong text without an error
    _supports_attention_backend = False
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": GolfDecoderLayer, "attentions": GolfAttention}  # noqa: RUF012

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Refuse torch's older kind where blocks read more than one stream: those would get no gradients."""
        is_reentrant = enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant", False)
        streams = ("lanes", "embedding_residual", "value_embedding_layers")
        if is_reentrant and (switch := next((name for name in streams if getattr(self.config, name)), None)):
            raise ValueError(f"gradient checkpointing: with {switch}, use_reentrant must be False, the default.")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *args, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize as every transformers model does, and the table of value embeddings as well."""
        resized: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)
        if self.config.value_embedding_layers:
            module: Any = self.base_model.value_embedding
            module.table = self._get_resized_embeddings(module.table, resized.num_embeddings)
        return resized

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize one module's own parameters with transformers' functions, which skip loaded weights.

        - Input matrices: normal with std 0.5 / sqrt(fan-in), so activations are about 0.5 at any width.
        - Output projections and an untied head: zero. The first loss is ln V, and no block disturbs the residual
          stream before it has learned something.
        - A tied embedding: normal with std 1 / C. A token's logit for itself is about std * C, and must stay near 1
          for the first loss to be near ln V. (A std of 0.02 at C = 768 would give 15.)
        - matrix_init and tied_embedding_std change the first and the third; the rest is in _STARTS.
        """
        config = self.config
        for name, parameter in module.named_parameters(recurse=False):
            start = config.query_gain if name == "query_gain" else _STARTS.get(name)
            if start is not None:
                init.copy_(parameter, torch.tensor(start))
        if isinstance(module, nn.Linear):
            is_head = module is getattr(self, "lm_head", None)
            if isinstance(module, OutputLinear) or (is_head and not config.tie_word_embeddings):
                init.zeros_(module.weight)
            elif not is_head:  # a tied head is initialized as the embedding
                self._init_matrix(module)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            untied_std = config.initializer_range or 0.02
            tied_std = config.tied_embedding_std or 1 / (config.embedding_size or config.hidden_size)
            init.normal_(module.weight, std=tied_std if config.tie_word_embeddings else untied_std)
        elif isinstance(module, GolfBigram):
            init.zeros_(module.table.weight)
        elif isinstance(module, GolfValueEmbedding):
            init.normal_(module.table.weight, std=0.01)
        elif isinstance(module, (GolfRMSNorm, nn.LayerNorm)) and module.weight is not None:
            init.ones_(module.weight)
            bias = getattr(module, "bias", None)
            if bias is not None:
                init.zeros_(bias)

    def _init_matrix(self, module: nn.Linear) -> None:
        """Initialize an input matrix: normal, uniform in +-1 / sqrt(fan-in), or orthogonal with gain 1."""
        config, weight = self.config, module.weight
        if config.matrix_init == "uniform":
            init.uniform_(weight, -(module.in_features**-0.5), module.in_features**-0.5)
        elif config.matrix_init == "orthogonal":
            sizes = config.fused_rows if isinstance(module, FusedLinear) else (module.out_features,)
            if not getattr(weight, "_is_hf_initialized", False):  # a loaded weight needs no QR decomposition
                parts = [torch.empty_like(part, dtype=torch.float32) for part in weight.split(sizes)]
                init.copy_(weight, torch.cat([nn.init.orthogonal_(part) for part in parts]))
        elif config.matrix_init == "normal":
            init.normal_(weight, std=config.initializer_range or 0.5 / math.sqrt(module.in_features))
        else:
            raise ValueError(f"matrix_init: {config.matrix_init!r} is unknown.")


class GolfModel(GolfPreTrainedModel, GolfStack):
    """The transformer without its head: token ids in, normed hidden states out."""

    _auto_class = "AutoModel"

    def __init__(self, config: GolfConfig) -> None:
        super().__init__(config)
        config.settle_rope()
        self.build(config, GolfDecoderLayer)
        self.gradient_checkpointing = False
        self.post_init()

    @_takes_cache
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states (B, T, C). The arguments are those of every transformers decoder.

        If position_ids is None, positions count only the tokens that attention_mask keeps, so left padding does not
        shift them. Since transformers 5.24, cache is the KV cache and past_key_values its old name; before, cache is a
        paged cache, which the attention kernel updates.

        Raises:
            TypeError: an argument is unknown.
            ValueError: input_ids and inputs_embeds are both given or both missing; there are more tokens than learned
                positions; or the model can't do what an argument asks for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("GolfModel.forward needs exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        config = self.config
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        cache, is_paged = _one_cache(past_key_values, cache)
        self._require_known(kwargs, is_paged)
        if (switch := config.switch_that_reads_ids) is not None:
            self._require_whole_rows(switch, input_ids, use_cache or cache is not None)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None:
                raise ValueError("GolfModel: gradient checkpointing would write each key into the KV cache twice.")
            use_cache = False
        if is_paged and len(layer_order(config)) > config.num_hidden_layers:
            raise ValueError("GolfModel: a paged cache has one layer for each layer of the model; a loop needs more.")
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        if cache is not None and not is_paged:
            _add_cache_layers(cache, len(layer_order(config)))
        returned = {CACHE: cache}
        if is_paged and CACHE != "cache":  # its kernels update a paged cache
            kwargs["cache"], cache = cache, None
        # Pass the caller's position_ids, not the derived ones: under torch.compile, any position_ids make transformers
        # check for packed sequences and build a full mask. None becomes is_causal=True in SDPA.
        same_document = self._same_document(input_ids)
        causal_mask = None
        given = (attention_mask, position_ids, cache, same_document)
        if self.config._attn_implementation not in NEED_NO_MASK or any(each is not None for each in given):
            causal_mask = create_causal_mask(
                config, inputs_embeds, attention_mask, cache, position_ids=position_ids, and_mask_function=same_document
            )
        past_tokens = 0 if cache is None or is_paged else cache.get_seq_length()
        if not is_paged:  # that packs the tokens of several texts into one row
            self._require_learned_positions(past_tokens + inputs_embeds.shape[1])
        if position_ids is None:
            position_ids = _derive_position_ids(inputs_embeds, attention_mask, past_tokens)
        if config.rope_parameters:
            kwargs["rotation"] = _scaled_rotation(position_ids, config)
        hidden_states = self.run(
            inputs_embeds,
            position_ids,
            input_ids,
            attention_mask=causal_mask,
            past_key_values=cache,
            attend=ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager_attention),
            **kwargs,
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **returned)

    def _same_document(self, input_ids: Tensor | None) -> Callable[..., Tensor] | None:
        """Return the mask that confines attention to a document, as transformers wants it; None if nothing does."""
        if self.config.attention_span == "stream" or input_ids is None:
            return None
        documents = document_numbers(input_ids, self.config)
        return lambda batch, head, query, key: documents[batch, query] == documents[batch, key]

    def _require_known(self, arguments: dict[str, Any], is_paged: bool) -> None:
        """Refuse what would be ignored: a name from a newer transformers must not silently do nothing."""
        unknown = sorted(key for key, value in arguments.items() if value is not None and key not in PASSED_ON)
        if unknown:
            raise TypeError(f"GolfModel.forward got arguments that it does not know: {', '.join(unknown)}.")
        if arguments.get("is_causal") is False and not is_paged:  # a paged cache comes with a mask
            raise ValueError(
                "GolfModel: is_causal=False is not possible: the model was trained on earlier tokens only."
            )

    def _require_whole_rows(self, switch: str, input_ids: Tensor | None, is_caching: bool) -> None:
        """Refuse what a switch cannot work with: it reads the ids of a token and of those before it."""
        if input_ids is None:
            raise ValueError(f"GolfModel: {switch} needs input_ids; inputs_embeds alone are not enough.")
        if is_caching and switch != "value_embedding_layers":
            raise ValueError(f"GolfModel: {switch} needs earlier ids, which no KV cache keeps; pass use_cache=False.")
        if switch == "attention_span" and self.config._attn_implementation.startswith("flash"):
            raise ValueError('GolfModel: attention_span="document" needs a mask; use attn_implementation "sdpa".')
        if switch == "attention_span" and self.config.bos_token_id is None:
            raise ValueError('GolfModel: attention_span="document" needs bos_token_id, the token between documents.')

    def _require_learned_positions(self, num_tokens: int) -> None:
        limit = self.config.max_position_embeddings
        if self.config.position_embedding == "learned" and num_tokens > limit:
            raise ValueError(
                f"GolfModel: a sequence of {num_tokens} tokens is longer than max_position_embeddings={limit},"
                " the number of learned positions. Shorten it (in generate(): lower max_new_tokens)."
            )


def _derive_position_ids(inputs_embeds: Tensor, attention_mask: Tensor | None, past_tokens: int) -> Tensor:
    T = inputs_embeds.shape[1]
    places = torch.arange(T, device=inputs_embeds.device) + past_tokens
    if attention_mask is not None and attention_mask.ndim == 2:  # (B, past + T), or all places of a static cache
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return positions if positions.shape[1] == T else positions.index_select(1, places)
    return places[None]


def _scaled_rotation(position_ids: Tensor, config: GolfConfig) -> Rotation:
    """Return what `layers_golf._rotation` does, with the frequencies of transformers' own models."""
    frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, position_ids.device)
    cos, sin = cos_and_sin(position_ids[:, None, :, None].float() * frequencies)
    return cos * factor, sin * factor


def _one_cache(past_key_values: Any, cache: Any) -> tuple[Any, bool]:
    """Return the KV cache that was given under either name, and whether it is paged."""
    if past_key_values is not None and cache is not None:
        raise ValueError("GolfModel.forward needs at most one of cache and past_key_values.")
    cache = past_key_values if cache is None else cache
    if isinstance(cache, list | tuple):  # taken for a paged one, it would be ignored
        raise ValueError("GolfModel.forward needs a Cache such as DynamicCache, instead of keys and values in a tuple.")
    return cache, not (cache is None or isinstance(cache, Cache))


def _add_cache_layers(cache: Cache, count: int) -> None:
    """Give each pass through a looped layer its own keys and values: transformers made one cache layer per layer."""
    while cache.layers and len(cache.layers) < count:
        cache.layers.append(copy.deepcopy(cache.layers[0]))  # still empty, because this is the first pass


class ChunkedCrossEntropy(nn.Module):
    """`chunked_cross_entropy` as a module, because torch compiles modules in place."""

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        return chunked_cross_entropy(hidden, weight, targets, *settings)


class GolfForCausalLM(GolfPreTrainedModel, GenerationMixin):
    """The transformer with its language modeling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _auto_class = "AutoModelForCausalLM"
    chunk_elements: int | None = None
    """Logits per chunk of the loss; None: a size for any card. The result differs only by rounding."""

    def __init__(self, config: GolfConfig) -> None:
        super().__init__(config)
        self.model = GolfModel(config)
        size = config.embedding_size or config.hidden_size
        if config.embedding_size:
            self.head_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.cross_entropy = ChunkedCrossEntropy()
        self.post_init()

    def fused_projections(self) -> dict[str, tuple[int, ...]]:
        """Map each fused weight's name to the row counts of its matrices: (H*D, K*D, K*D) for q, k and v."""
        rows, layers = self.config.fused_rows, range(self.config.num_hidden_layers)
        return {f"model.layers.{i}.self_attn.qkv_proj.weight": rows for i in layers}

    @_takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the loss, the logits (B, T, V), or both.

        Args:
            labels: (B, T) the same ids as input_ids; shifted here. -100 is ignored.
            num_items_in_batch: divisor of the summed loss. None: the number of targets that are not ignored.
            logits_to_keep: compute only the last logits_to_keep logits (0: all), or those at the given time indices:
                (K,), or (B, K) of each row, or a bool mask (B, T), whose logits come as (number of True, V).
            return_logits: None: return them unless the model is training with labels. The training loss is computed
                in chunks, so the logits of the whole batch never exist.
            shift_labels: (B, T) labels already shifted: the id after each position. -100 is ignored. Like in
                transformers' own models it has no parameter: Trainer would demand it of each batch, as of any parameter
                with "label" in its name, and otherwise report no eval_loss.
        """
        targets = kwargs.pop("shift_labels", None)
        if targets is None and labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if use_cache is None and targets is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=_one_cache(past_key_values, cache)[0],
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if self.config.embedding_size:
            hidden_states = self.head_proj(hidden_states)
        loss = None
        if targets is not None and targets.shape != hidden_states.shape[:2]:
            shapes = f"{tuple(targets.shape)}, but the input has {tuple(hidden_states.shape[:2])}"
            raise ValueError(f"GolfForCausalLM: labels have the shape {shapes}; give one for each position.")
        if targets is not None and not self._has_plain_head():
            logits = self._logits(hidden_states, 0).float().flatten(0, 1)
            nats = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        elif targets is not None:
            nats = self.cross_entropy(
                hidden_states.flatten(0, 1),
                self.lm_head.weight,
                targets.flatten(),
                self.config.logit_soft_cap,
                self.config.logit_soft_cap_negative,
                self.config.soft_cap_form,
                self.chunk_elements,
            )
        if targets is not None:
            if num_items_in_batch is None:
                num_items_in_batch = (targets != IGNORE_INDEX).sum().clamp(min=1)
            loss = nats / num_items_in_batch
        if return_logits is None:
            return_logits = targets is None or not self.training
        return CausalLMOutputWithPast(
            loss=loss,
            logits=self._logits(hidden_states, logits_to_keep) if return_logits else None,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _has_plain_head(self) -> bool:
        """Return whether the head is its weight: no adapter, not quantized, and not fetched for each call."""
        return type(self.lm_head).forward is nn.Linear.forward and "forward" not in self.lm_head.__dict__

    def _logits(self, hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, int):
            kept = hidden_states[:, -logits_to_keep:]
        elif logits_to_keep.dtype == torch.bool:
            kept = hidden_states[logits_to_keep]
        elif logits_to_keep.ndim == 2:
            kept = torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)
        else:
            kept = hidden_states[:, logits_to_keep]
        return cap_logits(self.lm_head(kept), self.config)


# Trainer shifts the labels of label smoothing, and pipelines take a model for text generation, by this table alone.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[GolfConfig.model_type] = GolfForCausalLM.__name__


class GolfForSequenceClassification(GenericForSequenceClassification, GolfPreTrainedModel):
    """The transformer with a classifier that reads the last token that is not padding."""

    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: GolfConfig) -> None:
        _build_with_head(self, config, "score", config.num_labels)


class GolfForTokenClassification(GenericForTokenClassification, GolfPreTrainedModel):
    """The transformer with a classifier that reads each token."""

    _auto_class = "AutoModelForTokenClassification"

    def __init__(self, config: GolfConfig) -> None:
        _build_with_head(self, config, "score", config.num_labels)
        self.dropout = nn.Dropout(config.dropout)


class GolfForQuestionAnswering(GenericForQuestionAnswering, GolfPreTrainedModel):
    """The transformer with a head that finds where the answer to a question starts and ends in a text."""

    _auto_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: GolfConfig) -> None:
        _build_with_head(self, config, "qa_outputs", 2)


def _build_with_head(model: Any, config: GolfConfig, head: str, outputs: Any) -> None:
    """Build a model of transformers' generic classes, whose own way to the transformer is AutoModel."""
    GolfPreTrainedModel.__init__(model, config)
    model.num_labels = config.num_labels
    model.model = GolfModel(config)
    setattr(model, head, nn.Linear(config.hidden_size, outputs, bias=False))
    model.post_init()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    soft_cap: float | None = None,
    soft_cap_negative: float | None = None,
    soft_cap_form: str = "tanh",
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden @ weight.T), summed over targets in fp32 nats, one chunk at a time.

    The forward pass also computes the gradients while it has a chunk's logits, so nothing is recomputed and no (N, V)
    tensor is ever kept. These are the gradients of the sum; the backward pass scales them. Their factors are in
    [-1, 1], which fp16 can represent. The gradients of a mean over many tokens would underflow.

    Args:
        hidden: (N, C). Under autocast, hidden and weight are cast to its dtype; softmax and sums stay in fp32.
        weight: (V, C).
        targets: (N,) ids. -100 is ignored; if all are ignored, the result is 0.
        soft_cap: cap the logits z to soft_cap * tanh(z / soft_cap). soft_cap_negative: the cap of those below 0.
        soft_cap_form: "tanh" or "poly5" (see `squash`).
        chunk_elements: the most logits in a chunk, at least one row. None: `default_chunk_elements`.
    """
    chunk_elements = chunk_elements or default_chunk_elements(hidden.device.type)
    caps = (soft_cap, soft_cap_negative, soft_cap_form)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedCrossEntropy.apply(hidden, weight, targets, chunk_elements, *caps)
    return _nats_and_gradients(hidden, weight, targets, chunk_elements, caps, False, False)[0]


def default_chunk_elements(device: str) -> int:
    """Return the logits per chunk of the loss that suit any device of a type."""
    return CHUNK_ELEMENTS_CPU if device == "cpu" else CHUNK_ELEMENTS_ACCELERATOR


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_elements: int, *caps: Any) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        nats, *gradients = _nats_and_gradients(
            hidden, weight, targets, chunk_elements, caps, wants_hidden, wants_weight
        )
        ctx.save_for_backward(*gradients)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = (
            None if gradient is None else gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors
        )
        return hidden_gradient, weight_gradient, None, None, None, None, None


def _head_rows(vocabulary: int, device: str, dtype: torch.dtype) -> int:
    """Return the rows of the head in the products: tensor cores need a multiple of 64 for their fastest kernels."""
    return vocabulary if device == "cpu" or dtype.itemsize > 2 else -(-vocabulary // 64) * 64


def _nats_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_elements: int,
    caps: tuple[Any, ...],
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    soft_cap, soft_cap_negative, soft_cap_form = caps
    device = hidden.device.type
    compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
    vocabulary = weight.shape[0]
    padding = _head_rows(vocabulary, device, compute_dtype) - vocabulary
    head = F.pad(weight.to(compute_dtype), (0, 0, 0, padding)) if padding else weight.to(compute_dtype)
    nats = torch.zeros((), dtype=sum_dtype, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
    weight_gradient = torch.zeros_like(head, dtype=sum_dtype) if wants_weight else None
    rows = max(1, chunk_elements // vocabulary)
    if compute_dtype == torch.float16:
        rows = min(rows, MAX_ROWS_FP16)
    counts = (targets != IGNORE_INDEX)[:, None]
    # the ignored become 0; the others stay, so that gather refuses what is no id, such as -1
    columns = (targets[:, None] * counts, counts, -counts.to(sum_dtype))
    for start in range(0, hidden.shape[0], rows):
        chunk = hidden[start : start + rows].to(compute_dtype)
        target, counted, minus_counted = (column[start : start + rows] for column in columns)
        logits = (chunk @ head.T).to(sum_dtype)
        if soft_cap is not None:
            cap = soft_caps(logits, soft_cap, soft_cap_negative)
            logits = logits / cap
            squashed = squash(logits, soft_cap_form)
            kept = logits if soft_cap_form == "poly5" else squashed  # what the slope is computed from
            logits = squashed * cap
        if padding:
            logits[:, vocabulary:] = -math.inf
        logits = logits.log_softmax(dim=-1)  # reuse the name, so that the raw logits are freed
        # out of place: torch 2.11 compiles a result that was changed in place to gradients of 0 (pytorch#180642)
        nats = nats - (logits.gather(1, target) * counted).sum()
        if not (wants_hidden or wants_weight):
            continue
        # d loss / d logits = p - onehot(target), and 0 in ignored rows
        gradient = logits.exp_().mul_(counted)
        if torch.compiler.is_compiling():  # a comparison fuses with its neighbors, a scatter does not
            gradient = gradient + (torch.arange(len(head), device=head.device) == target) * minus_counted
        else:
            gradient.scatter_add_(1, target, minus_counted)
        if soft_cap is not None:
            gradient *= _squash_slope(kept, soft_cap_form)
        gradient = gradient.to(compute_dtype)
        if hidden_gradient is not None:
            hidden_gradient[start : start + rows] = gradient @ head
        if weight_gradient is not None:
            if compute_dtype == sum_dtype:
                torch.addmm(weight_gradient, gradient.T, chunk, out=weight_gradient)  # no second (V, C) matrix
            else:  # accumulate in fp32: a bf16 sum would round away the later chunks
                weight_gradient += gradient.T @ chunk
    weight_gradient = None if weight_gradient is None else weight_gradient[:vocabulary].to(weight.dtype)
    return nats, hidden_gradient, weight_gradient


def _squash_slope(kept: Tensor, form: str) -> Tensor:
    """Return the derivative of `squash`. kept: its result for tanh, its input for poly5."""
    if form == "tanh":
        return 1 - kept.square()
    square = kept * kept
    return torch.where(squash(kept, form).abs() < 1, 1 - square + square * square / 3, 0.0)
