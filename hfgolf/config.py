"""Everything a run can be told, as frozen dataclasses, one a section.

Owns the keys, their meaning, defaults and ranges. Does not know how they are typed (command_line.py does that) nor
what they cause; imports nothing heavy, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hfgolf.errors import UserError

_MAX_INT = 10**15  # of whole numbers; doubles hold them all
_MAX_FLOAT = 1e38  # more is infinite in fp32

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def _require(key: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise UserError(f"{key}: {shortened(value)} is out of range; allowed: {allowed}.")


def _require_positive(section: str, config: object, *names: str, maximum: int | None = None) -> None:
    for name in names:
        value = getattr(config, name)
        allowed = "a number above 0" + (f", up to {maximum}" if maximum else "")
        _require(f"{section}.{name}", value, value is None or 0 < value <= (maximum or math.inf), allowed)


def _require_not_negative(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(f"{section}.{name}", value, value is None or value >= 0, "0 or more")


def _require_sane(key: str, value: object) -> None:
    """Refuse what no key can use, and what would end much later in an overflow or an encoding error."""
    if isinstance(value, list | tuple):
        for item in value:
            _require_sane(key, item)
    elif isinstance(value, str):
        is_text = "\0" not in value and value == value.encode("utf-8", "ignore").decode()
        _require(key, value, is_text, "text in UTF-8, without NUL")
    elif isinstance(value, int | float) and key != "run.seed":
        maximum = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
        _require(key, value, abs(value) <= maximum, f"numbers up to {maximum:g}")


def shortened(value: object) -> str:
    """Return a value as an error line shows it: its repr, cut in the middle if it is long."""
    return _SHORT.repr(value)


def join_words(words: Iterable[Any], last: str = ", ") -> str:
    """Join words as a person would list them: "a, b or c" with last=" or "."""
    texts = [str(word) for word in words]
    return last.join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def _nearest_multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"{below} or {above}" if below else str(above)


@dataclass(frozen=True)
class RunSection:
    """The run and its folder."""

    name: str | None = None
    """Name of the run and of its folder below output_dir; null takes the config file's name."""
    output_dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 1337
    """Seeds the weights, dropout and the order of the batches."""
    price_per_hour: float | None = None
    """Dollars an hour for the whole machine, for the cost in the report; null: not known."""

    def __post_init__(self) -> None:
        _require("run.seed", self.seed, 0 <= self.seed < 2**63, "0 to 9223372036854775807")
        _require_not_negative("run", self, "price_per_hour")
        name = self.name
        _require(
            "run.name", name, name is None or re.fullmatch(r"\w[\w.-]*", name) is not None, "letters, digits, . _ -"
        )
        is_short = name is None or len(name.encode()) <= 200  # a file's name has 255 at most
        _require("run.name", name, is_short, "up to 200 bytes")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is split; nothing here changes how it is read during training."""

    source: Literal["python_stdlib", "files", "hub"] = "python_stdlib"
    """python_stdlib: the source of this interpreter's standard library; files: data.files; hub: data.hub_name."""
    files: list[str] = field(default_factory=list)
    """Paths, globs, URLs: txt, md, py (a file is a document), jsonl, parquet, csv (a row is); also .gz, .zst."""
    hub_name: str | None = None
    """Dataset on the Hub, such as roneneldan/TinyStories."""
    hub_config: str | None = None
    """Configuration of the Hub dataset."""
    hub_split: str = "train"
    """Split of the Hub dataset to read; the validation part is held out from it."""
    streaming: bool = False
    """Read a Hub dataset over the network into the token cache, not download it first; a resume is as exact as ever."""
    text_column: str = "text"
    """Column that holds the text in jsonl, parquet, csv and Hub datasets."""
    max_documents: int | None = None
    """Read only the first so many documents (files or rows); null reads all."""
    split: Literal["documents", "contiguous"] = "documents"
    """documents: each goes to train or validation by a hash of its name; contiguous: the last characters validate."""
    val_fraction: float = 0.05
    """Share of the documents (or, contiguous, of the characters) held out for validation."""
    val_files: list[str] = field(default_factory=list)
    """Validation files stated outright (as data.files); then everything in data.files trains."""
    cache_dir: str | None = None
    """Folder of the token cache; null takes <HF_HOME>/hfgolf."""
    in_memory: Literal["auto", True, False] = "auto"
    """Copy the tokens into RAM (true), read them from the memory map (false), or decide by size against free memory."""
    num_workers: int = 0
    """DataLoader worker processes; 0 gathers the batches in the training process."""
    prefetch_factor: int | None = None
    """Batches that each worker keeps ready; null: torch's default, 2. Needs data.num_workers above 0."""

    def __post_init__(self) -> None:
        _require("data.val_fraction", self.val_fraction, 0 < self.val_fraction < 1, "a number between 0 and 1")
        _require_positive("data", self, "max_documents")
        _require("data.num_workers", self.num_workers, 0 <= self.num_workers <= 1024, "0 to 1024")
        ahead = self.prefetch_factor
        _require("data.prefetch_factor", ahead, ahead is None or 1 <= ahead <= 1024, "null, or 1 to 1024")
        if ahead is not None and not self.num_workers:
            raise UserError(
                f"data.prefetch_factor: {ahead} needs workers that fetch; set data.num_workers to 1 or more, or leave"
                " it null."
            )
        if self.source == "files" and not self.files:
            raise UserError("data.files is empty while data.source is files; name at least one path, glob or URL.")
        if self.source == "hub" and not self.hub_name:
            raise UserError(
                "data.hub_name is null while data.source is hub; name a dataset, such as roneneldan/TinyStories."
            )
        if self.source != "files" and (self.files or self.val_files):
            raise UserError(f"data.files and data.val_files need data.source files, not {self.source}.")


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens."""

    kind: Literal["bpe", "byte", "char", "pretrained"] = "bpe"
    """bpe: byte-level BPE trained on the train part; byte; char; pretrained: see tokenizer.name_or_path."""
    vocab_size: int = 4096
    """Entries of a BPE vocabulary, specials included; byte, char and pretrained know their own."""
    name_or_path: str | None = None
    """For kind pretrained: a Hub name, a folder, or a file: tokenizer.json, *.tiktoken, SentencePiece's *.model."""

    def __post_init__(self) -> None:
        _require("tokenizer.vocab_size", self.vocab_size, 257 <= self.vocab_size < 2**24, "257 to 16777215")
        if self.kind == "pretrained" and not self.name_or_path:
            raise UserError(
                "tokenizer.name_or_path is null while tokenizer.kind is pretrained; name one, such as gpt2."
            )


@dataclass(frozen=True)
class ModelSection:
    """The shape of the model: a modern block by default; docs/config.md has the options that make it GPT-2."""

    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 5
    """Transformer blocks."""
    num_attention_heads: int = 4
    """Query heads; must divide hidden_size."""
    num_key_value_heads: int | None = None
    """Key and value heads (grouped-query attention); null: as many as query heads."""
    intermediate_size: int | None = None
    """Width of the MLP; null: 4 x hidden_size."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the MLP and before the head."""
    position_embedding: Literal["rope", "learned", "none"] = "rope"
    """rope: rotary; learned: a table as in GPT-2; none."""
    activation: Literal["relu2", "gelu", "gelu_new", "silu", "swiglu"] = "relu2"
    """Of the MLP; relu2 is the squared ReLU, gelu_new is GPT-2's tanh approximation."""
    use_bias: bool = False
    """Biases in the linear layers and layer norms."""
    qk_norm: bool = True
    """RMSNorm on queries and keys, before the rotation."""
    embedding_norm: bool = True
    """A norm right after the embedding; false in GPT-2."""
    logit_soft_cap: float | None = None
    """Squash the logits z to cap * tanh(z / cap)."""
    tie_word_embeddings: bool = True
    """Share one matrix between embedding and head."""
    dropout: float = 0.0
    """Dropout on embedding and residual branches."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights; on a CPU it costs a fifth of a step."""
    gradient_checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass: less memory, about a third more compute."""

    def __post_init__(self) -> None:
        _require_positive("model", self, "hidden_size", "intermediate_size", "num_attention_heads", maximum=2**17)
        _require_positive("model", self, "num_hidden_layers", maximum=1000)
        _require_positive("model", self, "num_key_value_heads", "logit_soft_cap")
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            _require(f"model.{name}", rate, 0 <= rate < 1, "0 up to, but not including, 1")
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            near = _nearest_multiples(width, heads)
            raise UserError(
                f"model.hidden_size: {width} is not divisible by model.num_attention_heads {heads}; try {near}."
            )
        if self.position_embedding == "rope" and width // heads % 2:
            raise UserError(
                f"model.hidden_size / model.num_attention_heads is {width // heads}; rope needs an even number."
            )
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            allowed = join_words(n for n in range(1, heads + 1) if heads % n == 0)
            raise UserError(
                f"model.num_key_value_heads: {self.num_key_value_heads} does not divide"
                f" model.num_attention_heads {heads}; allowed: {allowed}."
            )


@dataclass(frozen=True)
class BatchConfig:
    """How many tokens an optimizer step sees, and in which portions."""

    sequence_length: int = 256
    """Tokens of context in a training sequence."""
    tokens_per_step: int = 4096
    """Tokens in one optimizer step over all processes; accumulation is derived from it."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences a process runs at once; auto: the most that memory rules allow."""

    def __post_init__(self) -> None:
        length = self.sequence_length
        _require("batch.sequence_length", length, 2 <= length <= 2**24, "2 to 16777216")
        _require_positive("batch", self, "tokens_per_step", maximum=2**40)
        if self.micro_batch_size != "auto":
            _require_positive("batch", self, "micro_batch_size")
        if self.tokens_per_step % self.sequence_length:
            near = _nearest_multiples(self.tokens_per_step, self.sequence_length)
            raise UserError(
                f"batch.tokens_per_step: {self.tokens_per_step} is not a multiple of"
                f" batch.sequence_length {self.sequence_length}; try {near}."
            )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step over all processes."""
        return self.tokens_per_step // self.sequence_length

    def micro_batch_sizes(self, num_processes: int) -> list[int]:
        """Return the sequences a process may run at once, ascending: those that divide its share of a step evenly."""
        share, rest = divmod(self.sequences_per_step, num_processes)
        if rest:
            return []
        small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
        return sorted({*small, *(share // n for n in small)})

    def accumulation_steps(self, micro_batch_size: int, num_processes: int) -> int:
        """Return the micro-batches each process runs in one optimizer step.

        Raises UserError, naming the nearest values that work, where the division leaves a rest.
        """
        tokens = micro_batch_size * self.sequence_length * num_processes
        if self.tokens_per_step % tokens:
            nearest = sorted(self.micro_batch_sizes(num_processes), key=lambda n: abs(n - micro_batch_size))[:3]
            or_size = f" or batch.micro_batch_size {join_words(sorted(nearest))}" if nearest else ""
            raise UserError(
                f"batch.tokens_per_step: {self.tokens_per_step} cannot be made of micro-batches of {micro_batch_size} x"
                f" {self.sequence_length} tokens on {num_processes} process{'es' if num_processes > 1 else ''};"
                f" try batch.tokens_per_step {_nearest_multiples(self.tokens_per_step, tokens)}{or_size}."
            )
        return self.tokens_per_step // tokens


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer; under muon, the hidden matrices follow Muon and everything else AdamW."""

    name: Literal["muon", "adamw", "sgd"] = "muon"
    """muon: Muon on the hidden matrices and AdamW elsewhere; adamw; sgd (with optim.momentum)."""
    learning_rate: float = 0.02
    """Peak learning rate of the matrices (muon), or of every parameter (adamw, sgd)."""
    adamw_learning_rate: float = 0.003
    """Under muon: peak learning rate of norms, biases and an untied head."""
    embedding_learning_rate: float | None = None
    """Peak learning rate of the embeddings; null: as the other AdamW parameters."""
    momentum: float = 0.95
    """Momentum of Muon and of SGD."""
    nesterov: bool = True
    """Nesterov momentum in Muon and SGD."""
    momentum_warmup_steps: int = 300
    """Steps in which Muon's momentum rises from optim.momentum_start to optim.momentum; SGD's stays constant."""
    momentum_start: float = 0.85
    """Muon's momentum at the first step, or optim.momentum where that is lower."""
    momentum_end: float | None = None
    """Muon's momentum at the end, reached linearly over the last schedule.warmdown_fraction of the run; null: stays."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices only, times the group's learning rate."""
    newton_schulz_coefficients: Literal["classic", "polar_express"] = "polar_express"
    """Polynomial of Muon's orthogonalisation."""
    newton_schulz_steps: int = 5
    """Iterations of that polynomial."""
    newton_schulz_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """What its products are computed in; auto: bf16 where the hardware is fast at it, else fp32."""
    update_scale: Literal["original", "match_rms_adamw"] = "original"
    """Muon's scale: sqrt(max(1, rows/columns)), or 0.2 sqrt(max(rows, columns)), which suits AdamW's learning rate."""
    split_qkv: bool = True
    """Orthogonalise the queries', keys' and values' parts of the fused projection apart."""
    row_equilibration: bool = False
    """Divide each row by its norm before the orthogonalisation (MuonEq-R)."""
    normuon_beta2: float | None = None
    """Decay rate of NorMuon's running mean square of each row, which evens out the rows afterwards; null: off."""
    cautious_weight_decay: bool = False
    """Decay only the weights that the step moves towards 0."""
    ema_decay: float | None = None
    """Decay a step of the moving average of the weights; null: none, or as optim.ema_half_life_tokens says."""
    ema_half_life_tokens: int | None = None
    """The same as the tokens after which a weight's share of the average has halved; null: see optim.ema_decay."""
    ema_export: bool = False
    """Choose best, stop early and export by the averaged weights instead of the raw ones."""

    def __post_init__(self) -> None:
        _require_positive("optim", self, "learning_rate", "adamw_learning_rate", "embedding_learning_rate", "eps")
        _require_not_negative("optim", self, "weight_decay", "momentum_warmup_steps")
        for name in ("momentum", "momentum_start", "momentum_end"):
            value = getattr(self, name)
            _require(f"optim.{name}", value, value is None or 0 <= value < 1, "0 up to, but not including, 1")
        _require("optim.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        steps = self.newton_schulz_steps
        maximum = 5 if self.newton_schulz_coefficients == "polar_express" else 20
        _require("optim.newton_schulz_steps", steps, 1 <= steps <= maximum, f"1 to {maximum}")
        beta2 = self.normuon_beta2
        _require("optim.normuon_beta2", beta2, beta2 is None or 0 <= beta2 < 1, "null, or a number from 0 to below 1")
        decay = self.ema_decay
        _require("optim.ema_decay", decay, decay is None or 0 < decay < 1, "a number between 0 and 1")
        _require_positive("optim", self, "ema_half_life_tokens")
        if decay is not None and self.ema_half_life_tokens is not None:
            raise UserError(
                f"optim.ema_decay: {decay} and optim.ema_half_life_tokens {self.ema_half_life_tokens} both say how fast"
                " the average moves; set one and leave the other null."
            )
        if self.ema_export and not self.has_ema:
            raise UserError(
                "optim.ema_export is true while no average is kept; set optim.ema_decay or optim.ema_half_life_tokens."
            )

    @property
    def has_ema(self) -> bool:
        """Say whether a moving average of the weights is kept; ema.py works out its decay."""
        return self.ema_decay is not None or self.ema_half_life_tokens is not None


@dataclass(frozen=True)
class ScheduleConfig:
    """How learning rates and weight decay move over the run, as a share of their peaks."""

    name: Literal["constant", "linear", "cosine", "cosine_warmdown", "wsd"] = "wsd"
    """linear and cosine fall from the end of the warmup, wsd over the last schedule.warmdown_fraction of the run;
    cosine_warmdown is cosine, times what falls from 1 to 0 over that last part."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly to its peak."""
    warmdown_fraction: float = 0.4
    """Share of the run, at its end, in which wsd falls to the floor and cosine_warmdown to 0."""
    warmdown_shape: Literal["linear", "1-sqrt"] = "linear"
    """How the warmdown falls; 1-sqrt: as 1 - sqrt(share of the warmdown done), steep at first."""
    floor: float = 0.0
    """Share of the peak at which the schedule ends; cosine_warmdown: at which its cosine would."""
    weight_decay: Literal["constant", "linear", "learning_rate"] = "constant"
    """Of optim.weight_decay: it stays, falls linearly to 0 over the run, or is multiplied as the learning rate is."""

    def __post_init__(self) -> None:
        _require_not_negative("schedule", self, "warmup_steps")
        fraction = self.warmdown_fraction
        _require("schedule.warmdown_fraction", fraction, 0 <= fraction <= 1, "0 to 1")
        _require("schedule.floor", self.floor, 0 <= self.floor <= 1, "0 to 1")


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, in which precision, and how often to log, evaluate and save."""

    max_steps: int | None = None
    """Optimizer steps; the run ends at the first of max_steps, max_tokens, max_epochs and max_minutes."""
    max_tokens: int | None = None
    """Training tokens, rounded up to whole steps."""
    max_epochs: float | None = None
    """Passes over the training blocks."""
    max_minutes: float | None = None
    """Minutes of training, compilation and evaluation included; the schedule ends with them."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """null: what `accelerate` was told, else bf16 where the hardware is fast at it, else no (fp32)."""
    compile: Literal["auto", True, False] = "auto"
    """torch.compile; auto: where a compiler is there and the run is long enough to earn the compile time back."""
    cpu_threads: int | Literal["auto"] = "auto"
    """Threads of a CPU process; auto: the cores shared out over the processes (`accelerate launch` says 1)."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient's global norm to this; null only measures it."""
    log_every_steps: int = 10
    """Steps between two rows of metrics.jsonl."""
    eval_every_steps: int = 250
    """Steps between two evaluations; the last step is always evaluated."""
    eval_tokens: int | None = None
    """Validation tokens in an evaluation during the run; null: all. The last evaluation is always whole."""
    sample_tokens: int | None = 64
    """Tokens that the model writes at each evaluation, for metrics.jsonl, trackers and the report; null: none."""
    save_every_steps: int | None = 500
    """Steps between two checkpoints; null: none by steps. The last step is always saved."""
    save_every_minutes: float | None = 10.0
    """Most minutes from one checkpoint to the next; null: none by time."""
    keep_last: int = 2
    """Checkpoints kept beside the best one."""
    resume: str | None = None
    """auto: go on where the run stopped, or begin it; latest, best or a path: that checkpoint; null starts afresh."""
    resume_with_other: Literal["data"] | None = None
    """data: let a resume go on with other text, split, seed or sequence length than before; null: refuse that."""
    patience_evals: int | None = None
    """Stop after so many evaluations without an improvement; null: never. The best weights are exported either way."""
    min_improvement: float = 0.0
    """Nats a token by which the validation loss must fall to count as an improvement."""
    max_skipped_steps: int = 5
    """Steps in a row whose gradient is not finite that are skipped, before the run goes back to its last checkpoint;
    fp16's search for a loss scale does not count."""
    rollback_on: list[Literal["nonfinite", "spike", "divergence"]] = field(default_factory=lambda: ["nonfinite"])
    """What makes a run go back, in a list: nonfinite gradients, a loss spike (a jump by a fifth or more that lasts
    train.max_skipped_steps), divergence (the median of 50 losses a fifth above its lowest)."""
    max_rollbacks: int = 3
    """Times the run may go back; after that it stops with a diagnosis."""
    rollback_learning_rate_factor: float = 0.5
    """Factor on all learning rates at each time; the batches that were skipped are left out in any case."""
    deterministic: bool = False
    """Deterministic kernels on GPUs (slower); on one CPU process a run is always repeatable."""

    def __post_init__(self) -> None:
        _require_positive("train", self, "max_steps", maximum=10**9)
        _require_positive("train", self, "max_tokens", "max_epochs", "max_minutes", "max_grad_norm")
        _require_positive("train", self, "log_every_steps")
        _require_positive("train", self, "eval_every_steps", "eval_tokens", "sample_tokens")
        _require_positive("train", self, "save_every_steps", "save_every_minutes")
        _require_positive("train", self, "keep_last", "patience_evals", "max_skipped_steps")
        _require_not_negative("train", self, "min_improvement", "max_rollbacks")
        factor = self.rollback_learning_rate_factor
        _require("train.rollback_learning_rate_factor", factor, 0 < factor <= 1, "above 0, up to 1")
        if self.cpu_threads != "auto":
            _require_positive("train", self, "cpu_threads", maximum=1024)
        if all(limit is None for limit in (self.max_steps, self.max_tokens, self.max_epochs, self.max_minutes)):
            raise UserError(
                "train: the run has no end; set one of train.max_steps, train.max_tokens, train.max_epochs,"
                " train.max_minutes."
            )


@dataclass(frozen=True)
class TrackConfig:
    """Trackers that get a copy of metrics.jsonl."""

    trackers: list[str] = field(default_factory=list)
    """Any of Accelerate's: wandb, tensorboard, ..."""
    project: str = "hfgolf"
    """Project in the tracker."""
    run_name: str | None = None
    """Name in the tracker; null: run.name."""
    offline: bool = False
    """Keep wandb on this machine (upload later with `wandb sync`)."""


@dataclass(frozen=True)
class HubConfig:
    """Pushing the model to the Hugging Face Hub."""

    push: bool = False
    """Push the model when the run ends."""
    repo_id: str | None = None
    """Repository, as user/name."""
    private: bool = False
    """Create the repository as a private one."""
    every_steps: int | None = None
    """Also push every so many steps; null: only at the end."""

    def __post_init__(self) -> None:
        _require_positive("hub", self, "every_steps")
        if self.push and not self.repo_id:
            raise UserError("hub.repo_id is null while hub.push is true; name the repository, as user/name.")


@dataclass(frozen=True)
class RunConfig:
    """One run, whole: what `configs/*.yaml` and the command line describe."""

    run: RunSection = field(default_factory=RunSection)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelSection = field(default_factory=ModelSection)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=1000))
    track: TrackConfig = field(default_factory=TrackConfig)
    hub: HubConfig = field(default_factory=HubConfig)

    def __post_init__(self) -> None:
        for key, value in self.flat().items():
            _require_sane(key, value)

    def flat(self) -> dict[str, Any]:
        """Return the config as {"section.key": value}."""
        return {
            f"{section.name}.{key.name}": getattr(getattr(self, section.name), key.name)
            for section in dataclasses.fields(self)
            for key in dataclasses.fields(getattr(self, section.name))
        }

    def replace(self, **values: Any) -> RunConfig:
        """Return a copy with `section__key=value` replaced, checked again."""
        sections = {section.name: getattr(self, section.name) for section in dataclasses.fields(self)}
        for name, value in values.items():
            section, key = name.split("__")
            sections[section] = dataclasses.replace(sections[section], **{key: value})
        return RunConfig(**sections)
