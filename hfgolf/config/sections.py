"""The config of a run: one frozen dataclass per section.

Owns the keys, their meanings, defaults and ranges. Does not know how users set them (see parse.py) or what they
do. Imports nothing heavy, so `--help` is quick. The docstring under each key is its `--help` text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from hfgolf.config.schedules import ScheduleName
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words, shortened

_MAX_INT = 10**15  # a double represents every integer up to here exactly
_MAX_FLOAT = 1e38  # larger values overflow fp32
_MIN_EVAL_TOKENS = 4096  # fewer are too noisy to choose the best step by


def _require(key: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise UserError(f"{key}: {shortened(value)} is out of range; allowed: {allowed}.")


def _require_positive(section: str, config: object, *names: str, maximum: int | None = None) -> None:
    for name in names:
        value = getattr(config, name)
        allowed = "a number above 0" + (f", up to {maximum}" if maximum else "")
        is_allowed = value is None or (not isinstance(value, str) and 0 < value <= (maximum or math.inf))
        _require(f"{section}.{name}", value, is_allowed, allowed)


def _require_not_negative(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(f"{section}.{name}", value, value is None or value >= 0, "0 or more")


def _require_sane(key: str, value: object) -> None:
    """Reject values that no key can use and that would cause an overflow or an encoding error much later."""
    if isinstance(value, list | tuple):
        for item in value:
            _require_sane(key, item)
    elif isinstance(value, dict):
        for item in value.items():
            _require_sane(key, item)
    elif isinstance(value, str):
        is_text = "\0" not in value and value == value.encode("utf-8", "ignore").decode()
        _require(key, value, is_text, "text in UTF-8, without NUL")
    elif isinstance(value, int | float) and key != "run.seed":
        maximum = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
        _require(key, value, abs(value) <= maximum, f"numbers up to {maximum:g}")


@functools.cache
def _choices(section: type) -> dict[str, list[str]]:
    """Return {key: names} of the keys of a section that take names out of a few, and no other text."""
    choices: dict[str, list[str]] = {}
    for key, kind in typing.get_type_hints(section).items():
        parts = [kind]
        while any(typing.get_args(part) for part in parts):
            parts = [inner for part in parts for inner in (typing.get_args(part) or [part])]
        names = [part for part in parts if isinstance(part, str)]
        choices |= {key: names} if names and str not in parts else {}
    return choices


def _require_known(section: str, config: Any) -> None:
    """Reject a name that no key knows; the command line does so itself."""
    kind: Any = type(config)
    for key, names in _choices(kind).items():
        value = getattr(config, key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item not in names:
                allowed = join_words(names, last=" or ")
                raise UserError(f"{section}.{key}: {shortened(item)} is not allowed; allowed: {allowed}.")


def budgeted_eval_tokens(tokens_per_step: int, every_steps: int, passes: int = 1) -> int:
    """Return how many tokens an evaluation may read: 5 % of the compute of the steps since the one before.

    It counts FLOPs, not seconds, so that every machine evaluates the same tokens. A training token costs three forward
    passes (see measure/flops.py), an evaluated one as many as `passes`.
    """
    return max(_MIN_EVAL_TOKENS, 3 * tokens_per_step * every_steps // (20 * passes))


def _nearest_multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"{below} or {above}" if below else str(above)


@dataclass(frozen=True)
class RunSection:
    """The run and its folder."""

    name: str | None = None
    """Name of the run and of its folder in output_dir; null: the name of the config file."""
    output_dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 1337
    """Seed of the weights, dropout and batch order."""
    price_per_hour: float | None = None
    """Dollars per hour for the whole machine, used for the cost in the report; null: unknown."""

    def __post_init__(self) -> None:
        _require("run.seed", self.seed, 0 <= self.seed < 2**63, "0 to 9223372036854775807")
        _require_not_negative("run", self, "price_per_hour")
        name = self.name
        _require(
            "run.name", name, name is None or re.fullmatch(r"\w[\w.-]*", name) is not None, "letters, digits, . _ -"
        )
        is_short = name is None or len(name.encode()) <= 200  # file systems allow 255; leave room for suffixes
        _require("run.name", name, is_short, "up to 200 bytes")


@dataclass(frozen=True)
class DataSection:
    """Where the text comes from and how it is split into training and validation."""

    source: Literal["python_stdlib", "files", "hub", "shards"] = "python_stdlib"
    """python_stdlib: the source code of Python's standard library; files: see data.files; hub: see data.hub_name;
    shards: data.files and data.val_files hold token ids, with the header of llm.c and the golf challenge, without one
    (nanoGPT), as datatrove's .ds or as .npy. tokenizer.kind pretrained or byte says whose tokens they are."""
    files: list[str] = field(default_factory=list)
    """Paths, folders, globs or URLs (http, hf, s3, ...); implies data.source files. Text files hold one document each;
    jsonl, json, csv, tsv, parquet, arrow and folders of save_to_disk one per row. Also .gz, .bz2, .xz, .zst and .zip;
    see docs/data.md."""
    hub_name: str | None = None
    """Hub dataset, such as roneneldan/TinyStories."""
    hub_config: str | None = None
    """Configuration of the Hub dataset."""
    hub_split: str = "train"
    """Split of the Hub dataset to read; validation documents are held out from it."""
    streaming: bool = False
    """Stream a Hub dataset into the token cache instead of downloading it first; resuming stays exact."""
    text_column: str = "text"
    """Column that holds the text in tables and Hub datasets; of nested columns a path, such as message.content or
    conversation.0.text."""
    ids_column: str | None = None
    """Column that holds token ids, such as input_ids, to use instead of text; a separator in a row ends a document.
    tokenizer.kind pretrained or byte says whose tokens they are."""
    messages_column: str | None = None
    """Column that holds conversations, such as messages: lists of {"role", "content"} (or "from", "value"), which the
    tokenizer's chat template turns into tokens. The loss counts the assistant's turns only; see docs/models.md."""
    max_documents: int | None = None
    """Read only the first N documents (files or rows); null: all."""
    split: Literal["documents", "contiguous"] = "documents"
    """documents: assign each document by a hash of its name; contiguous: validate on the last characters, as with
    text files too few for the other."""
    val_fraction: float = 0.05
    """Fraction of the documents (contiguous: of the characters) held out for validation."""
    val_files: list[str] = field(default_factory=list)
    """Explicit validation files, in the format of data.files; then all of data.files is used for training."""
    old_text: list[str] = field(default_factory=list)
    """With model.init_from: text that its weights know, as files like data.files or as the folder of a run, which means
    that run's validation text. Evaluated each time, to see what training forgets; never chooses the best step."""
    val_bytes_files: list[str] = field(default_factory=list)
    """With shards: files beside those of validation that hold the bytes of text of each token, 16 bits each, in a
    shard's format; empty: the tokenizer's vocabulary says them."""
    separator_id: int | None = None
    """With shards: the token between documents, which becomes the tokenizer's end of text if it is a special token;
    null: the tokenizer's end of text."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """shuffled: each epoch reads the blocks in another order, which follows from run.seed; sequential: as they lie."""
    cache_dir: str | None = None
    """Folder of the token cache; null: <HF_HOME>/hfgolf."""
    in_memory: Literal["auto", True, False] = "auto"
    """true: copy the tokens into RAM; false: memory-map them; auto: decide by their size and the free memory."""
    num_workers: int = 0
    """DataLoader worker processes; 0: load batches in the training process."""

    def __post_init__(self) -> None:
        for name in ("files", "val_files", "old_text", "val_bytes_files"):
            if isinstance(getattr(self, name), str):  # a path is a list of one
                object.__setattr__(self, name, [getattr(self, name)])
        _require("data.val_fraction", self.val_fraction, 0 < self.val_fraction < 1, "a number between 0 and 1")
        _require_positive("data", self, "max_documents")
        _require("data.num_workers", self.num_workers, 0 <= self.num_workers <= 1024, "0 to 1024")
        if self.source in ("files", "shards") and not self.files:
            raise UserError(
                f"data.files is empty, but data.source is {self.source}; name at least one path, folder, glob or URL."
            )
        if self.source == "shards" and not self.val_files:
            raise UserError("data.val_files is empty, but data.source is shards; name the validation shards.")
        if self.source != "shards" and (self.val_bytes_files or self.separator_id is not None):
            raise UserError(
                f"data.val_bytes_files and data.separator_id require data.source shards, not {self.source}."
            )
        _require_not_negative("data", self, "separator_id")
        is_cut = self.split == "contiguous" and not self.val_files
        for name in ("ids_column", "messages_column"):
            if getattr(self, name) is not None and (self.source not in ("hub", "files") or is_cut):
                raise UserError(
                    f"data.{name} requires data.source hub or files, and data.split documents or data.val_files."
                )
        if self.ids_column is not None and self.messages_column is not None:
            raise UserError("data.ids_column and data.messages_column are both set; name one of them.")
        if self.source == "hub" and not self.hub_name:
            raise UserError(
                "data.hub_name is null, but data.source is hub; name a dataset, such as roneneldan/TinyStories."
            )
        if self.source not in ("files", "shards") and (self.files or self.val_files):
            raise UserError(f"data.files and data.val_files require data.source files or shards, not {self.source}.")


@dataclass(frozen=True)
class TokenizerSection:
    """How text becomes tokens."""

    kind: Literal["bpe", "byte", "char", "pretrained"] = "bpe"
    """bpe: byte-level BPE trained on the training text; byte; char; pretrained: see tokenizer.name_or_path."""
    vocab_size: int | Literal["auto"] = "auto"
    """Size of a BPE vocabulary, including special tokens; auto: 4096, or as many as the text supports, and of less than
    200 kB only the 256 bytes. Ignored by byte, char and pretrained."""
    name_or_path: str | None = None
    """For pretrained: a Hub name, a folder, or a file (tokenizer.json, *.tiktoken, SentencePiece *.model)."""
    case_operators: bool = False
    """With bpe: capital letters become operators and lower-case letters, without loss; see docs/experiments.md."""

    def __post_init__(self) -> None:
        if self.case_operators and self.kind != "bpe":
            raise UserError(
                f"tokenizer.case_operators: true requires tokenizer.kind bpe, not {self.kind}, whose entries are given."
            )
        _require("tokenizer.vocab_size", self.vocab_size, 257 <= self.max_vocab_size < 2**24, "257 to 16777215")
        if self.kind == "pretrained" and not self.name_or_path:
            raise UserError(
                "tokenizer.name_or_path is null, but tokenizer.kind is pretrained; name a tokenizer, such as gpt2."
            )

    @property
    def max_vocab_size(self) -> int:
        """Return the size of a BPE vocabulary if the text supports it."""
        return self.vocab_size if isinstance(self.vocab_size, int) else 4096


_KEYS_OF_ANY_ARCHITECTURE = (
    *("architecture", "overrides", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "tie_word_embeddings", "dropout", "attention_dropout", "gradient_checkpointing"),
    *("init_from", "max_position_embeddings", "vocab_size"),
)


@dataclass(frozen=True)
class ModelSection:
    """The model architecture: a modern block by default; docs/config.md has the options that make it GPT-2."""

    init_from: str | None = None
    """Weights to start from, at step 0 with a new optimizer: a run (runs/small), a checkpoint, an exported folder or a
    Hub name. The architecture and the tokenizer are those of the weights; see docs/models.md."""
    architecture: str = "golf"
    """golf, or any causal language model of transformers: a model type (llama, qwen3, gpt2, mamba, ...), which takes
    its shape and dropout from this section, or a folder or Hub name, which has the shape in its config.json; see
    docs/models.md."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Other fields of the architecture's own config, by their names there: {rms_norm_eps: 1e-5} for llama,
    {head_gate: 12} for golf. On the command line also one at a time: --model.overrides.head_gate 12."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 5
    """Number of transformer blocks."""
    num_attention_heads: int = 4
    """Number of query heads; must divide hidden_size."""
    num_key_value_heads: int | None = None
    """Number of key and value heads (grouped-query attention); null: same as query heads."""
    intermediate_size: int | None = None
    """Width of the MLP; null: 4 x hidden_size."""
    norm: str = "rmsnorm"
    """Normalization before attention, before the MLP and before the head: rmsnorm or layernorm."""
    position_embedding: str = "rope"
    """rope: rotary embedding; learned: GPT-2's position table; none."""
    max_position_embeddings: int | None = None
    """Longest sequence that the model is for, in tokens: a hard limit with learned positions; null: as long as
    batch.sequence_length."""
    vocab_size: int | None = None
    """Rows of the embedding; null: as many as the tokenizer has entries."""
    activation: str = "relu2"
    """Activation of the MLP: relu2 (squared ReLU), leaky_relu2, gelu, gelu_new (GPT-2's tanh approximation of GELU),
    silu or swiglu (gated)."""
    use_bias: bool = False
    """Use biases in linear layers and layer norms."""
    qk_norm: bool = True
    """Apply RMSNorm to queries and keys before the rotary embedding."""
    embedding_norm: bool = True
    """Normalize right after the embedding; false for GPT-2."""
    tie_word_embeddings: bool = True
    """Share one matrix between the embedding and the head."""
    dropout: float = 0.0
    """Dropout rate on the embedding and the residual branches."""
    attention_dropout: float = 0.0
    """Dropout rate on the attention weights; on a CPU it makes a step about 20 % slower."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory, costs about a third more compute."""

    def __post_init__(self) -> None:
        _require_positive("model", self, "hidden_size", "intermediate_size", "num_attention_heads", maximum=2**17)
        _require_positive("model", self, "num_hidden_layers", maximum=1000)
        _require_positive("model", self, "num_key_value_heads")
        _require_positive("model", self, "max_position_embeddings", "vocab_size", maximum=2**24)
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            _require(f"model.{name}", rate, 0 <= rate < 1, "from 0 to below 1")
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            near = _nearest_multiples(width, heads)
            raise UserError(
                f"model.hidden_size: {width} is not divisible by model.num_attention_heads {heads}; try {near}."
            )
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            allowed = join_words(n for n in range(1, heads + 1) if heads % n == 0)
            raise UserError(
                f"model.num_key_value_heads: {self.num_key_value_heads} does not divide"
                f" model.num_attention_heads {heads}; allowed: {allowed}."
            )
        _require("model.architecture", self.architecture, bool(self.architecture.strip()), "golf, or a name")
        if self.architecture != "golf":
            self._require_no_golf()

    def _require_no_golf(self) -> None:
        """Refuse what another architecture would ignore."""
        keys = (key for key in dataclasses.fields(self) if key.name not in _KEYS_OF_ANY_ARCHITECTURE)
        stated = [f"model.{key.name}" for key in keys if getattr(self, key.name) != key.default]
        if stated:
            raise UserError(
                f"{stated[0]}: it is an option of architecture golf, and model.architecture is {self.architecture};"
                " leave its default, or use model.overrides."
            )


def model_key(name: str) -> str:
    """Return the key that sets a field of GolfConfig: of the section, or one of its overrides."""
    return f"model.{name}" if name in ModelSection.__dataclass_fields__ else f"model.overrides.{name}"


@dataclass(frozen=True)
class BatchSection:
    """How many tokens one optimizer step reads, and how they are divided into micro-batches."""

    sequence_length: int = 256
    """Tokens per training sequence (the context length)."""
    tokens_per_step: int = 4096
    """Tokens per optimizer step over all processes; gradient accumulation follows from it."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences per forward pass of one process; auto: chosen to fit the predicted memory."""
    segment_length: int | None = None
    """Tokens per segment: the first sequences of the training are made of segments from different places of the text,
    so that a step sees more of it; null: none are. model.init_from on the command line makes a file's value null."""
    segmented_tokens: int | None = 1_000_000
    """How many tokens are read so, from the start of the training; null: all. Without segment_length, none are."""

    def __post_init__(self) -> None:
        length = self.sequence_length
        _require("batch.sequence_length", length, 2 <= length <= 2**24, "2 to 16777216")
        _require_positive("batch", self, "tokens_per_step", maximum=2**40)
        segment = self.segment_length
        allowed = segment is None or segment >= length or (segment > 0 and length % segment == 0)
        divisor = f"null, a divisor of batch.sequence_length {length}, or more than it (which changes nothing)"
        _require("batch.segment_length", segment, allowed, divisor)
        _require_positive("batch", self, "segmented_tokens", maximum=2**60)
        if self.micro_batch_size != "auto":
            _require_positive("batch", self, "micro_batch_size")
        if self.tokens_per_step % self.sequence_length:
            near = _nearest_multiples(self.tokens_per_step, self.sequence_length)
            raise UserError(
                f"batch.tokens_per_step: {self.tokens_per_step} is not a multiple of"
                f" batch.sequence_length {self.sequence_length}; try {near}."
            )

    @property
    def is_segmented(self) -> bool:
        """Return whether the first sequences are made of segments."""
        return self.segment_length is not None and self.segment_length < self.sequence_length

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences per optimizer step over all processes."""
        return self.tokens_per_step // self.sequence_length

    def micro_batch_sizes(self, num_processes: int) -> list[int]:
        """Return the possible micro-batch sizes, ascending: those that divide a process's share of a step evenly."""
        share, rest = divmod(self.sequences_per_step, num_processes)
        if rest:
            return []
        small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
        return sorted({*small, *(share // n for n in small)})

    def accumulation_steps(self, micro_batch_size: int, num_processes: int) -> int:
        """Return the micro-batches that each process runs per optimizer step.

        Raises UserError, naming the nearest values that work, if they do not divide tokens_per_step evenly.
        """
        tokens = micro_batch_size * self.sequence_length * num_processes
        if self.tokens_per_step % tokens:
            nearest = sorted(self.micro_batch_sizes(num_processes), key=lambda n: abs(n - micro_batch_size))[:3]
            or_size = f" or batch.micro_batch_size {join_words(sorted(nearest))}" if nearest else ""
            raise UserError(
                f"batch.tokens_per_step: {self.tokens_per_step} is not a multiple of micro-batches of"
                f" {micro_batch_size} x {self.sequence_length} tokens on {num_processes}"
                f" process{'es' if num_processes > 1 else ''};"
                f" try batch.tokens_per_step {_nearest_multiples(self.tokens_per_step, tokens)}{or_size}."
            )
        return self.tokens_per_step // tokens


@dataclass(frozen=True)
class OptimSection:
    """The optimizer. With muon, the hidden matrices use Muon and everything else uses AdamW."""

    name: Literal["muon", "adamw", "sgd"] = "muon"
    """muon: Muon for the hidden matrices, AdamW for the rest; adamw; sgd (with optim.momentum)."""
    learning_rate: float = 0.02
    """Peak learning rate: of the hidden matrices (muon), or of all parameters (adamw, sgd)."""
    adamw_learning_rate: float = 0.003
    """With muon: peak learning rate of norms, biases and an untied head."""
    embedding_learning_rate: float | None = None
    """Peak learning rate of the embeddings; null: same as the other AdamW parameters."""
    vector_learning_rate: float | None = None
    """Peak learning rate of norms, biases, gains and gates; null: same as the other AdamW parameters."""
    momentum: float = 0.95
    """Momentum of Muon and of SGD, in Nesterov's form."""
    momentum_warmup_steps: int = 300
    """Steps over which Muon's momentum rises from optim.momentum_start to optim.momentum; SGD's is constant."""
    momentum_start: float = 0.85
    """Muon's momentum at the first step; optim.momentum if that is lower."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for the first and second moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; multiplied by the group's learning rate."""
    embedding_weight_decay: float = 0.0
    """The same for the embeddings, and with them a tied head."""
    head_weight_decay: float = 0.0
    """The same for an untied head."""
    vector_weight_decay: float = 0.0
    """The same for norms, biases, gains and gates."""
    newton_schulz_coefficients: Literal["classic", "polar_express"] = "polar_express"
    """Polynomial for Muon's orthogonalization."""
    newton_schulz_steps: int = 5
    """Newton-Schulz iterations per Muon update."""
    muon_every_steps: int = 1
    """Update each matrix in every so many steps, by so many times the learning rate: Muon takes less time per step.
    The matrices take turns, and their momentum follows every gradient. In as many steps, 2 ends about 0.006 nats per
    token higher; in as many minutes, it can end lower."""
    newton_schulz_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the Newton-Schulz products; auto: fp32 if train.mixed_precision is no, or if the hardware is not
    fast at bf16, else bf16."""
    update_scale: Literal["original", "match_rms_adamw"] = "original"
    """Scale of Muon's update. original: sqrt(max(1, rows/columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns)),
    which works with AdamW's learning rates."""
    row_equilibration: bool = False
    """Divide each row by its norm before orthogonalization (MuonEq-R)."""
    normuon_beta2: float | None = None
    """Decay rate of NorMuon's running mean square per row, which normalizes the rows of the update; null: off."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the optimizer keeps momentum and moments between steps. bf16 halves their memory; it needs
    momentum and betas of at most 0.98."""
    cautious_weight_decay: bool = False
    """Apply weight decay only to weights that the update moves toward 0."""
    ema_decay: float | None = None
    """Decay per step of the exponential moving average (EMA) of the weights, 0.5 ** (batch.tokens_per_step / its
    half-life in tokens); null: no EMA."""
    ema_export: bool = False
    """Use the averaged weights instead of the raw ones to choose the best step, stop early and export."""

    def __post_init__(self) -> None:
        rates = ("learning_rate", "adamw_learning_rate", "embedding_learning_rate", "vector_learning_rate")
        _require_positive("optim", self, *rates, "eps", "muon_every_steps")
        decays = ("weight_decay", "embedding_weight_decay", "head_weight_decay", "vector_weight_decay")
        _require_not_negative("optim", self, *decays, "momentum_warmup_steps")
        for name in ("momentum", "momentum_start"):
            value = getattr(self, name)
            _require(f"optim.{name}", value, 0 <= value < 1, "from 0 to below 1")
        _require("optim.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        steps = self.newton_schulz_steps
        maximum = 5 if self.newton_schulz_coefficients == "polar_express" else 20
        _require("optim.newton_schulz_steps", steps, 1 <= steps <= maximum, f"1 to {maximum}")
        if self.state_dtype == "bf16":
            for name, largest in (("momentum", self.momentum), ("betas", max(self.betas))):
                _require(f"optim.{name}", largest, largest <= 0.98, "at most 0.98 with optim.state_dtype bf16")
        beta2 = self.normuon_beta2
        _require("optim.normuon_beta2", beta2, beta2 is None or 0 <= beta2 < 1, "null, or a number from 0 to below 1")
        decay = self.ema_decay
        _require("optim.ema_decay", decay, decay is None or 0 <= decay < 1, "from 0 to below 1")
        if self.ema_export and not self.has_ema:
            raise UserError("optim.ema_export is true, but there is no EMA; set optim.ema_decay.")

    @property
    def has_ema(self) -> bool:
        """Return whether the run keeps a moving average of the weights."""
        return self.ema_decay is not None


@dataclass(frozen=True)
class ScheduleSection:
    """How learning rates and weight decay change over the run, as fractions of their peaks."""

    name: ScheduleName = "wsd"
    """linear and cosine decay from the end of the warmup; wsd decays over the last schedule.warmdown_fraction of the
    run; cosine_warmdown is cosine times a factor that falls from 1 to 0 over that last part."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    warmdown_fraction: float = 0.4
    """Last fraction of the run, in which wsd decays to the floor and cosine_warmdown to 0."""
    floor: float = 0.0
    """Final learning rate as a fraction of the peak; for cosine_warmdown, the floor of its cosine."""
    weight_decay: Literal["constant", "linear", "learning_rate"] = "constant"
    """Schedule of optim.weight_decay: constant, linear to 0 over the run, or the schedule of the learning rate."""
    loop_start: float = 0.0
    """Fraction of the run after which model.overrides.loop begins; until then the layers run once each."""

    def __post_init__(self) -> None:
        _require_not_negative("schedule", self, "warmup_steps")
        fraction = self.warmdown_fraction
        _require("schedule.warmdown_fraction", fraction, 0 <= fraction <= 1, "0 to 1")
        _require("schedule.floor", self.floor, 0 <= self.floor <= 1, "0 to 1")
        _require("schedule.loop_start", self.loop_start, 0 <= self.loop_start < 1, "from 0 to below 1")


@dataclass(frozen=True)
class TrainSection:
    """How long to train, in which precision, and how often to log, evaluate and save."""

    max_steps: int | None = None
    """Optimizer steps. The run ends at whichever limit comes first: max_steps, max_tokens, max_epochs, max_minutes."""
    max_tokens: int | None = None
    """Training tokens, rounded up to whole steps."""
    max_epochs: float | None = None
    """Passes over the training data."""
    max_minutes: float | None = None
    """Minutes of training, including compilation and evaluation; the schedule then spans these minutes."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """null: the setting of `accelerate` if there is one, else bf16 if the hardware is fast at it, else fp16 on a GPU of
    compute capability 7 (V100, T4), else no (fp32)."""
    compile: Literal["auto", True, False] = "auto"
    """Use torch.compile; auto: if a compiler is available and the run is long enough to pay for compiling."""
    cpu_threads: int | Literal["auto"] = "auto"
    """Threads per CPU process; auto: divide the cores among the processes (`accelerate launch` would set 1)."""
    low_memory: bool = False
    """Train in less memory and more time: sets model.gradient_checkpointing true and optim.state_dtype bf16 unless they
    are stated, and on a CPU returns large blocks of memory at once."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this value; null: only measure it."""
    log_every_steps: int = 10
    """Log one row to metrics.jsonl every N steps."""
    eval_every_steps: int = 250
    """Evaluate every N steps, and always at the last step."""
    eval_tokens: int | Literal["auto"] | None = "auto"
    """Validation tokens per evaluation during the run; null: all; auto: as many as take 5 % of the compute of the steps
    between two evaluations, but at least 4096. The evaluation at the last step always uses all."""
    sample_tokens: int | None = 64
    """Tokens to sample from the model at each evaluation, for metrics.jsonl, trackers and the report; null: none."""
    sample_prompt: str = ""
    """Text that these samples, and the longer one at the end of the run, continue; empty: they start a document. With
    conversations, the model answers the first validation prompt instead."""
    save_every_steps: int | None = 500
    """Save a checkpoint every N steps, and always at the last step; null: not by steps."""
    save_every_minutes: float | None = 10.0
    """Also save when the last checkpoint is this many minutes old; null: not by time."""
    keep_last: int = 2
    """Newest checkpoints to keep, in addition to the best one."""
    resume: str | None = None
    """auto: resume the run, or start it if there is no checkpoint; latest, best or a path: resume from that
    checkpoint; null: start a new run."""
    resume_with_other: Literal["data"] | None = None
    """data: allow a resume to change the text, split, seed or sequence length; null: refuse."""
    patience_evals: int | None = None
    """Stop after N evaluations without improvement; null: never. The best weights are exported either way."""
    max_skipped_steps: int = 5
    """Consecutive steps with a nonfinite gradient to skip before rolling back to the last checkpoint; overflows of
    fp16's loss scaling do not count."""
    rollback_on: list[Literal["nonfinite", "spike", "divergence"]] = field(default_factory=lambda: ["nonfinite"])
    """What triggers a rollback, as a list: nonfinite gradients; a loss spike (20 % or more above the usual loss, for
    train.max_skipped_steps steps); divergence (the median of 50 losses is 20 % above its lowest value)."""
    max_rollbacks: int = 3
    """Rollbacks allowed; after that the run stops with a diagnosis. Each excludes the bad batches and halves all
    learning rates."""
    deterministic: bool = False
    """Use deterministic GPU kernels (slower); a run on one CPU process is always reproducible."""

    def __post_init__(self) -> None:
        _require_positive("train", self, "max_steps", maximum=10**9)
        _require_positive("train", self, "max_tokens", "max_epochs", "max_minutes", "max_grad_norm")
        _require_positive("train", self, "log_every_steps")
        _require_positive("train", self, "eval_every_steps", "sample_tokens")
        if self.eval_tokens != "auto":
            _require_positive("train", self, "eval_tokens")
        _require_positive("train", self, "save_every_steps", "save_every_minutes")
        _require_positive("train", self, "keep_last", "patience_evals", "max_skipped_steps")
        _require_not_negative("train", self, "max_rollbacks")
        if self.cpu_threads != "auto":
            _require_positive("train", self, "cpu_threads", maximum=1024)
        if all(limit is None for limit in (self.max_steps, self.max_tokens, self.max_epochs, self.max_minutes)):
            raise UserError(
                "train: the run has no limit; set train.max_steps, train.max_tokens, train.max_epochs or"
                " train.max_minutes."
            )


@dataclass(frozen=True)
class TrackSection:
    """Trackers that get a copy of metrics.jsonl."""

    trackers: list[str] = field(default_factory=list)
    """Trackers that Accelerate supports: trackio, wandb, tensorboard, ...; see docs/trackers.md."""
    project: str = "hfgolf"
    """Project name in the tracker."""
    offline: bool = False
    """Keep trackers with an account offline, to upload later (with `wandb sync`, for example)."""


@dataclass(frozen=True)
class HubSection:
    """Pushing the model to the Hugging Face Hub."""

    push: bool = False
    """Push the model to the Hub when the run ends."""
    repo_id: str | None = None
    """Repository, as user/name."""
    private: bool = False
    """Create the repository as private."""
    every_steps: int | None = None
    """Also push every N steps; null: only at the end."""
    format: Literal["auto", "golf", "native"] = "auto"
    """native: an architecture of transformers with the same logits, which loads without trust_remote_code; refused if
    there is none. golf: with hfgolf's modeling code. auto: native if there is one. The run folder holds golf."""
    license: str | None = None
    """License of the weights for the model card, by the Hub's name, such as apache-2.0 or other; null: unsaid."""
    language: list[str] = field(default_factory=list)
    """Languages of the text for the model card: codes of ISO 639 such as en or deu, also code and multilingual."""

    def __post_init__(self) -> None:
        _require_positive("hub", self, "every_steps")
        is_slug = self.license is None or re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", self.license) is not None
        _require("hub.license", self.license, is_slug, "a name in lower case such as apache-2.0")
        for code in self.language:
            is_code = re.fullmatch(r"[a-z]{2,3}|code|multilingual", code) is not None
            _require("hub.language", code, is_code, "codes of ISO 639 such as en or deu, code and multilingual")
        if self.push and not self.repo_id:
            raise UserError("hub.repo_id is null, but hub.push is true; name the repository, as user/name.")


@dataclass(frozen=True)
class GolfSection:
    """A model in a number of bytes: `hfgolf golf export` rounds its matrices and codes the integers."""

    budget_bytes: int | None = None
    """Bytes of everything that counts; null: say it at export."""
    count: Literal["challenge", "everything"] = "challenge"
    """What counts. challenge: the program and the weights; everything: also the packed tokenizer and config."""
    method: Literal["gptq", "nearest"] = "gptq"
    """gptq: pass the error of each rounded column on to the columns that follow; nearest: don't."""
    allocation: Literal["curvature", "sdclip", "uniform"] = "curvature"
    """Steps of the grid. curvature: finer if the loss is more sensitive; sdclip: proportional to the row's standard
    deviation; uniform: the same for all weights."""
    calibration_tokens: int = 32768
    """Training tokens from which the curvature is measured."""
    forecast_every_steps: int | None = None
    """Forecast every N steps of a run, and at the last one, what an export would take; null: never."""
    qat_fraction: float = 0.0
    """Last fraction of a run that trains with its matrices rounded to the grid that golf.budget_bytes allows."""

    def __post_init__(self) -> None:
        _require_positive("golf", self, "budget_bytes", "calibration_tokens", "forecast_every_steps")
        _require("golf.qat_fraction", self.qat_fraction, 0 <= self.qat_fraction <= 1, "0 to 1")
        if self.qat_fraction and self.budget_bytes is None:
            raise UserError("golf.budget_bytes is null, but golf.qat_fraction is set; state the bytes to train for.")


@dataclass(frozen=True)
class RunConfig:
    """The whole config of a run, as `configs/*.yaml` and the command line describe it."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    model: ModelSection = field(default_factory=ModelSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=lambda: TrainSection(max_steps=1000))
    track: TrackSection = field(default_factory=TrackSection)
    hub: HubSection = field(default_factory=HubSection)
    golf: GolfSection = field(default_factory=GolfSection)

    def __post_init__(self) -> None:
        for key, value in self.flat().items():
            _require_sane(key, value)
        for section in dataclasses.fields(self):
            _require_known(section.name, getattr(self, section.name))
        if self.schedule.loop_start and self.model.overrides.get("loop") is None:
            raise UserError("schedule.loop_start: it needs model.overrides.loop; set that, or leave it 0.")
        if self.data.old_text and self.model.init_from is None:
            raise UserError("data.old_text requires model.init_from: other weights know no text yet.")
        for key in ("qat_fraction", "forecast_every_steps"):
            if self.model.architecture != "golf" and getattr(self.golf, key):
                raise UserError(f"golf.{key}: it needs model.architecture golf, not {self.model.architecture}.")
        has_tokens = self.data.source == "shards" or self.data.ids_column is not None
        if has_tokens and self.tokenizer.kind not in ("pretrained", "byte") and self.model.init_from is None:
            source = "source shards" if self.data.source == "shards" else "ids_column"
            raise UserError(
                f"tokenizer.kind: {self.tokenizer.kind} is trained on text, but data.{source} has only tokens; set"
                " pretrained and tokenizer.name_or_path, or byte."
            )
        if self.batch.is_segmented and self.data.order == "sequential":
            raise UserError(
                f"batch.segment_length: {self.batch.segment_length} reads the text in another order than data.order"
                " sequential; set batch.segment_length null, or data.order shuffled."
            )
        positions = self.model.max_position_embeddings
        if self.model.position_embedding == "learned" and positions and self.batch.sequence_length > positions:
            raise UserError(
                f"batch.sequence_length: {self.batch.sequence_length} is longer than the {positions} learned positions"
                " of model.max_position_embeddings; make it shorter."
            )
        if self.data.messages_column is not None:
            self._require_chat()
        if self.golf.qat_fraction and self.optim.ema_export:
            raise UserError(
                "optim.ema_export: true does not go with golf.qat_fraction, because averages are on no grid; drop one."
            )

    def _require_chat(self) -> None:
        """Raise UserError for what does not go with data.messages_column."""
        if self.tokenizer.kind == "bpe" and self.tokenizer.max_vocab_size < 261:
            raise UserError(
                f"tokenizer.vocab_size: {self.tokenizer.vocab_size} is too small for data.messages_column, which needs"
                " 256 bytes and 5 special tokens; set 261 or more."
            )
        if self.golf.qat_fraction or self.golf.forecast_every_steps:
            raise UserError(
                "golf.qat_fraction and golf.forecast_every_steps do not go with data.messages_column, because golf"
                " scores all of a text; leave them unset."
            )
        if self.model.overrides.get("attention_span") == "document" and self.tokenizer.kind == "pretrained":
            raise UserError(
                "model.overrides.attention_span: document does not go with data.messages_column and a pretrained"
                " tokenizer, whose chat template may write the end of text inside a conversation; set stream."
            )

    @property
    def max_positions(self) -> int:
        """Return the longest sequence that the model is for, in tokens."""
        return max(self.batch.sequence_length, self.model.max_position_embeddings or 0)

    @property
    def eval_tokens(self) -> int | None:
        """Return train.eval_tokens, decided if it is auto."""
        if self.train.eval_tokens != "auto":
            return self.train.eval_tokens
        return budgeted_eval_tokens(self.batch.tokens_per_step, self.train.eval_every_steps, self.eval_passes)

    @property
    def eval_passes(self) -> int:
        """Return how many passes an evaluation makes: for the weights, their averages, and data.old_text."""
        return 1 + self.optim.has_ema + bool(self.data.old_text)

    @property
    def order_seed(self) -> int | None:
        """Return the seed of the order of the data; None: sequential."""
        return None if self.data.order == "sequential" else self.run.seed

    def flat(self) -> dict[str, Any]:
        """Return the config as {"section.key": value}."""
        return {
            f"{section.name}.{key.name}": getattr(getattr(self, section.name), key.name)
            for section in dataclasses.fields(self)
            for key in dataclasses.fields(getattr(self, section.name))
        }

    def replace(self, **values: Any) -> RunConfig:
        """Return a copy with each `section__key=value` replaced and checked."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, key = name.split("__")
            changes.setdefault(section, {})[key] = value
        sections = {name: dataclasses.replace(getattr(self, name), **keys) for name, keys in changes.items()}
        return dataclasses.replace(self, **sections)
