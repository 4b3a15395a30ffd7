"""The keys of a config, in one frozen section per part: meanings, defaults, types and bounds, and these in words.

Does not know how users set them (parse.py) or what they do. The docstring under a key is its `--help` text.
"""

from __future__ import annotations

import codecs
import functools
import math
import os
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from hfgolf.config import mixture
from hfgolf.config.milestones import milestone
from hfgolf.config.schedules import ScheduleName
from hfgolf.config.yaml_text import yaml_value
from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words, nearest, shortened

_MAX_INT = 10**15  # a double represents every integer up to here exactly
_MAX_FLOAT = 1e38  # larger values overflow fp32
_MIN_EVAL_TOKENS = 4096  # fewer are too noisy to choose the best step by
_IN_UTF8 = "text in UTF-8, without NUL"


def _known(value: Any) -> Any:
    """Return a value of model.overrides; raise ValueError for one that no field takes, and that fails much later."""
    is_known = isinstance(value, dict | list | tuple | None)
    for item in value if isinstance(value, list | tuple) else chain(*value.items()) if isinstance(value, dict) else ():
        _known(item)
    if isinstance(value, str):
        is_known = "\0" not in value and value == value.encode("utf-8", "ignore").decode()
    elif isinstance(value, int | float):
        is_known = abs(value) <= (_MAX_INT if isinstance(value, int) else _MAX_FLOAT)
    if not is_known:
        raise ValueError
    return value


def as_list(value: Any) -> Any:
    """Return a text alone as a list of one, and a tuple as a list."""
    return [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


def as_bytes(value: Any) -> Any:
    """Return a size with a unit as a number of bytes: 60000 for "60kB" and 65536 for "64KiB"; other values as they are.

    The units are pydantic's: kB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024.
    """
    with suppress(ValidationError):
        if isinstance(value, str) and value.strip()[-1:].isalpha():
            return int(_adapter(ByteSize).validate_python(value))
    return value


def plain(value: Any, kind: Any = Any) -> Any:
    """Return a value as YAML has it: paths as text, arrays and tuples as lists, numpy's numbers as Python's.

    kind: the type of its key. Text for one that takes none is what YAML 1.2 reads in it, and for true or false also
    YAML 1.1, which earlier versions read: yes, no, on and off. For one of names with no, false is no, as it was then.
    """
    if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist"):
        with suppress(RuntimeError):  # a tensor without numbers
            value = value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    parts = type_parts(kind)
    if isinstance(value, list | tuple):
        inner = typing.get_args(parts[0])[0] if typing.get_origin(parts[0]) in (list, tuple) else Any
        return [plain(item, inner) for item in value]
    names = [name for part in parts if typing.get_origin(part) is Literal for name in typing.get_args(part)]
    truth = {"yes": True, "on": True, "no": False, "off": False}.get(value.lower()) if isinstance(value, str) else value
    if truth is False and "no" in names:
        return "no"
    if not isinstance(value, str) or takes_text(kind) or value in names or not value.strip():
        return value  # empty text, as of a variable that is not set, is no null
    if isinstance(truth, bool) and bool in parts:
        return truth
    read = yaml_value(value)
    return read if any(has_type(read, part) for part in parts) else value  # a refusal shows what was written


def type_parts(kind: Any) -> list[Any]:
    """Return the types in a config type, without bounds: list[str] alone, or str and None in `str | None`."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return type_parts(arguments[0])
    is_one = not arguments or typing.get_origin(kind) in (list, dict, tuple, Literal)
    return [kind] if is_one else [part for argument in arguments for part in type_parts(argument)]


def takes_text(kind: Any) -> bool:
    """Return whether a key of this type takes any text, for its value or in a list."""
    return any(
        part in (str, Any) or (typing.get_origin(part) is list and takes_text(typing.get_args(part)[0]))
        for part in type_parts(kind)
    )


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value read from YAML or JSON fits a type annotation, with its bounds."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def _milestone(text: str) -> str:
    milestone(text)
    return text


def _short(name: str) -> str:
    if len(name.encode()) > 200:  # file systems allow 255; leave room for suffixes
        raise ValueError
    return name


_ESCAPES = rb"\u0041" + b"\x1b(B.xn--4ca"
"""ASCII that encodings with escapes read as something else."""


def _encoding(name: str) -> str:
    """Return the name of an encoding in which ASCII is ASCII, or of UTF-16 or UTF-32; raise ValueError for another."""
    ascii_text = bytes(range(128)).replace(b"\\", _ESCAPES)
    try:
        if codecs.lookup(name).name.startswith(("utf-16", "utf-32")) or ascii_text.decode(name) == ascii_text.decode():
            return name
    except (LookupError, UnicodeError) as error:
        raise ValueError from error
    raise ValueError


Count = Annotated[int, Field(ge=1, le=_MAX_INT)]
_BYTES = Field(ge=1, le=_MAX_INT, description="1 to 10^15 (also 60kB, 64KiB)")
Bytes = Annotated[int, _BYTES, BeforeValidator(as_bytes, json_schema_input_type=Count | str)]
Index = Annotated[int, Field(ge=0, le=_MAX_INT)]
Positive = Annotated[float, Field(gt=0, le=_MAX_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=_MAX_FLOAT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Width = Annotated[int, Field(ge=1, le=2**17)]
Positions = Annotated[int, Field(ge=1, le=2**24)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Texts = Annotated[list[Text], BeforeValidator(as_list, json_schema_input_type=list[Text] | Text)]
_ENCODING = Field(description="an encoding such as latin-1, windows-1252, shift_jis, gb18030 or utf-16-le")
Encoding = Annotated[str, _ENCODING, AfterValidator(_encoding)]
Auto = Literal["auto"]
_OVERRIDES = Field(description="a mapping of names to finite numbers, text, true, false, null, lists and mappings")
Overrides = Annotated[dict[str, Any], _OVERRIDES, AfterValidator(_known)]
_ENTRIES = Field(description="a list of mappings, each the keys of data for one text, and its weight")
Entries = Annotated[list[dict[str, Any]], _ENTRIES, AfterValidator(mixture.with_text_keys), AfterValidator(_known)]
_NAME = Field(pattern=r"^\w[\w.-]*$", description="letters, digits, . _ -, up to 200 bytes")
Name = Annotated[str, _NAME, AfterValidator(_short)]
REPOSITORY = r"^([\w-][\w.-]*/)?[\w-][\w.-]*$"
_REPOSITORY = Field(pattern=REPOSITORY, description="user/name, each of letters, digits, . _ -")
Repository = Annotated[str, _REPOSITORY]
_LICENSE = Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$", description="a name in lower case such as apache-2.0")
License = Annotated[str, _LICENSE]
_LANGUAGE = Field(pattern=r"^([a-z]{2,3}|code|multilingual)$", description="a code of ISO 639, code or multilingual")
Language = Annotated[str, _LANGUAGE]
Languages = Annotated[list[Language], BeforeValidator(as_list, json_schema_input_type=list[Language] | Language)]
Trigger = Literal["nonfinite", "spike", "divergence"]
Triggers = Annotated[list[Trigger], BeforeValidator(as_list, json_schema_input_type=list[Trigger] | Trigger)]


_MILESTONE = Field(description="an amount of tokens or words, such as 10M, 1.5B tokens or 100M words")
Milestones = Annotated[
    list[Annotated[str, _MILESTONE, AfterValidator(_milestone)]],
    BeforeValidator(as_list, json_schema_input_type=list[Text] | Text),
]


def shown(value: object) -> str:
    """Return a value for an error message, as YAML names it."""
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else " ".join(shortened(value).split())


def refusal(key: str, value: object, allowed: str) -> str:
    """Say in one line which key, which value, and what is allowed."""
    return f"{key}: {shown(value)} is not allowed; allowed: {allowed}."


def describe_type(kind: Any) -> str:
    """Describe the type of a key in words, with its bounds."""
    words: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words[type(None)] = "null"
    if kind in words:
        return words[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        field = next((part for part in arguments if isinstance(part, FieldInfo)), FieldInfo())
        return field.description or describe_type(arguments[0]) + _describe_bounds(field)
    if origin is Literal:
        return join_words((name if isinstance(name, str) else shown(name) for name in arguments), " or ")
    if origin is list:
        return f"a list, each {describe_type(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {describe_type(arguments[0])}"
    return " or ".join(map(describe_type, arguments)).replace(" or true or false", ", true or false")


def _describe_bounds(field: FieldInfo) -> str:
    is_above = any(hasattr(bound, "gt") for bound in field.metadata)
    words = {"gt": " above {}", "ge": " from {}"}
    words |= {"le": ", up to {}", "lt": ", below {}"} if is_above else {"le": " to {}", "lt": " to below {}"}
    found = ((word, getattr(bound, name, None)) for name, word in words.items() for bound in field.metadata)
    text = "".join(word.format(value) for word, value in found if value is not None)
    return text.replace(str(_MAX_INT), "10^15").replace(str(_MAX_FLOAT), "10^38")


class Section(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """Keys with their types and bounds. A value that these do not allow raises UserError, in one line."""

    def __init__(self, **values: Any) -> None:
        kinds = {key: field.annotation for key, field in type(self).model_fields.items()}
        try:
            super().__init__(**{key: plain(value, kinds.get(key, Any)) for key, value in values.items()})
        except ValidationError as error:
            raise self._explained(error) from error

    def _problems(self) -> Iterator[str]:
        """Say what does not go together, in one line each."""
        return iter(())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self._problems():
            raise UserError(problem)
        return self

    @classmethod
    def _explained(cls, error: ValidationError) -> UserError:
        """Return pydantic's first error as one line."""
        first = error.errors()[0]
        name, value = str(first["loc"][0]), first["input"]
        key = f"{cls.__name__.removesuffix('Section').lower()}.{name}" if cls.__name__ != "RunConfig" else name
        if first["type"] == "extra_forbidden":
            return UserError(f"{key}: there is no such key.")
        kind = key_types(cls)[name]
        allowed = describe_type(kind)
        if isinstance(value, str):
            allowed = allowed.replace("text", _IN_UTF8, 1)
        elif isinstance(value, int | float) and takes_text(kind):
            allowed += "; put text in quotes"
        return UserError(refusal(key, value, allowed))

    def replace(self, **values: Any) -> Self:
        """Return a checked copy with the values replaced."""
        return type(self)(**dict(self) | values)


def key_types(section: type) -> dict[str, Any]:
    """Return {key: type} of a section, with the bounds."""
    return {key: kind for key, kind in typing.get_type_hints(section, include_extras=True).items() if key[0] != "_"}


def budgeted_eval_tokens(trained_tokens: int, passes: int = 1) -> int:
    """Return how many tokens an evaluation may read: 5 % of the compute of so many tokens of training.

    It counts FLOPs, not seconds, so that every machine evaluates the same tokens. A training token costs three forward
    passes (see measure/flops.py), an evaluated one as many as `passes`.
    """
    return max(_MIN_EVAL_TOKENS, 3 * trained_tokens // (20 * passes))


def _nearest_multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"{below} or {above}" if below else str(above)


class RunSection(Section, frozen=True):
    """The run and its folder."""

    name: Name | None = None
    """Name of the run and of its folder in output_dir; null: that of the text or of the config file."""
    output_dir: Text = "runs"
    """Folder that holds the run folders."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1337
    """Seed of the weights, dropout and batch order."""
    price_per_hour: NotNegative | None = None
    """Dollars per hour for the whole machine, used for the cost in the report; null: unknown."""


class DataSection(Section, frozen=True):
    """Where the text comes from and how it is split into training and validation."""

    source: Literal["python_stdlib", "files", "hub", "shards", "mixture"] = "python_stdlib"
    """python_stdlib: the source code of Python's standard library; files: see data.files; hub: see data.hub_name;
    shards: data.files and data.val_files hold token ids, with the header of llm.c and the golf challenge, without one
    (nanoGPT), as datatrove's .ds or as .npy. tokenizer.kind pretrained or byte says whose tokens they are. mixture: see
    data.mixture."""
    files: Texts = []
    """Paths, folders, globs or URLs (http, hf, s3, ...); implies data.source files. Text files hold one document each;
    jsonl, json, csv, tsv, parquet, arrow and folders of save_to_disk one per row. Also .gz, .bz2, .xz, .zst, .zip and
    .tar; see docs/data.md."""
    mixture: Entries = []
    """Several texts, such as [{files: web/*.parquet, weight: 3}, {hub_name: user/books, weight: 1}]; implies
    data.source mixture. A weight is a share of the training sequences, or {tokens: share} if it changes during the
    training. Other keys are those of data, and what an entry does not state is that of data; see docs/data.md."""
    hub_name: Text | None = None
    """Hub dataset, such as roneneldan/TinyStories; implies data.source hub."""
    hub_config: Text | None = None
    """Configuration of the Hub dataset."""
    hub_split: Text = "train"
    """Split of the Hub dataset to read; validation documents are held out from it."""
    streaming: bool = False
    """Stream a Hub dataset into the token cache instead of downloading it first; resuming stays exact."""
    text_column: Text = "text"
    """Column that holds the text in tables and Hub datasets; of nested columns a path, such as message.content or
    conversation.0.text; in CSV without a header its number, from 0."""
    ids_column: Text | None = None
    """Column that holds token ids, such as input_ids, to use instead of text; a separator in a row ends a document.
    tokenizer.kind pretrained or byte says whose tokens they are."""
    messages_column: Text | None = None
    """Column that holds conversations, such as messages: lists of {"role", "content"} (or "from", "value"), which the
    tokenizer's chat template turns into tokens. Or that of answers, such as completion or output, if their prompts are
    in other columns. The loss counts the assistant's turns only; see docs/models.md."""
    encoding: Encoding | None = None
    """Encoding of text files that are not UTF-8, such as latin-1, windows-1252, shift_jis or utf-16-le; null: they are
    refused. Files in UTF-8, or with a byte order mark, are read as what they are."""
    max_documents: Count | None = None
    """Read only the first N documents (files or rows); null: all."""
    split: Literal["documents", "contiguous"] = "documents"
    """documents: assign each document by a hash of its name; contiguous: validate on the last characters, as with
    text files too few for the other."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of the documents (contiguous: of the characters) held out for validation."""
    val_files: Texts = []
    """Explicit validation files, in the format of data.files; then no part of data.files is held out."""
    old_text: Texts = []
    """With model.init_from: text that its weights know, as files like data.files or as the folder of a run, which means
    that run's validation text. Evaluated each time, to see what training forgets; never chooses the best step."""
    val_bytes_files: Texts = []
    """With shards: one file for each of data.val_files that holds the number of text bytes of each token, as 16-bit
    integers in the format of a shard; empty: the numbers come from the tokenizer's vocabulary."""
    separator_id: Index | None = None
    """With shards: the token between documents, which becomes the tokenizer's end of text if it is a special token;
    null: the tokenizer's end of text."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """shuffled: each epoch reads the blocks in another order, which follows from run.seed; sequential: in the order of
    the text."""
    cache_dir: Text | None = None
    """Folder of the token cache; null: <HF_HOME>/hfgolf."""
    in_memory: Auto | bool = "auto"
    """true: copy the tokens into RAM; false: memory-map them; auto: decide by their size and the free memory."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """DataLoader worker processes; 0: load batches in the training process."""

    def sources(self) -> dict[str, DataSection]:
        """Return {name: section} of each text: of a mixture, one for each entry; else this section, named ""."""
        if not self.mixture:
            return {"": self}
        names = mixture.entry_names(self.mixture)
        return {name: self._entry_section(entry) for name, entry in zip(names, self.mixture, strict=True)}

    def _entry_section(self, entry: Mapping[str, Any]) -> DataSection:
        """Return the section of an entry of data.mixture. Raises UserError if it is not valid."""
        own = {key: value for key, value in entry.items() if key not in ("name", "weight")}
        source = "files" if "files" in own else "hub" if "hub_name" in own else "python_stdlib"
        return DataSection(**{**dict(self), "mixture": [], "source": source, **own})

    def _problems_of_mixture(self) -> Iterator[str]:
        for key in ("files", "val_files", "val_bytes_files", "hub_name", "hub_config", "separator_id"):
            if getattr(self, key) not in (None, []):
                yield f"data.{key} is set beside data.mixture, which names all text; state it in an entry."
        allowed = (*_KEYS_OF_A_TEXT, "name", "weight")
        for number, entry in enumerate(self.mixture, 1):
            where = f"data.mixture: entry {number}"
            for key in entry.keys() - {*allowed}:
                is_of_all = key in type(self).model_fields and key != "mixture"
                advice = f"it is of all entries: data.{key}" if is_of_all else f"did you mean {nearest(key, allowed)}?"
                yield f"{where} cannot have {key}; {advice}{'' if advice[-1] == '?' else '.'}"
            if not {"files", "hub_name", "source"} & entry.keys():
                yield f"{where} names no text; state files, hub_name or source."
            if not has_type(entry.get("name"), Name | None):
                yield refusal(f"{where}: name", entry["name"], describe_type(Name))
            try:
                section = self._entry_section(entry)
            except UserError as error:
                yield f"{where}: {error}"
            else:
                if (section.messages_column is None) != (self.messages_column is None):
                    yield (
                        f"{where}: messages_column: conversations do not mix with text; state data.messages_column, and"
                        " in an entry only another name for it."
                    )
        yield from mixture.problems(self.mixture)

    def _problems(self) -> Iterator[str]:
        if (self.source == "mixture") != bool(self.mixture):
            yield (
                f"data.mixture has {len(self.mixture)} entries, but data.source is {self.source}; state one of them."
                if self.mixture
                else "data.mixture is empty, but data.source is mixture; name at least one text, with its weight."
            )
        if self.mixture:
            yield from self._problems_of_mixture()
            return
        if self.source in ("files", "shards") and not self.files:
            yield f"data.files is empty, but data.source is {self.source}; name at least one path, folder, glob or URL."
        if self.source == "shards" and not self.val_files:
            yield "data.val_files is empty, but data.source is shards; name the validation shards."
        if self.source != "shards" and (self.val_bytes_files or self.separator_id is not None):
            yield f"data.val_bytes_files and data.separator_id require data.source shards, not {self.source}."
        is_cut = self.split == "contiguous" and not self.val_files
        for name in ("ids_column", "messages_column"):
            if getattr(self, name) is not None and (self.source not in ("hub", "files") or is_cut):
                yield f"data.{name} requires data.source hub or files, and data.split documents or data.val_files."
        if self.ids_column is not None and self.messages_column is not None:
            yield "data.ids_column and data.messages_column are both set; name one of them."
        if self.source == "hub" and not self.hub_name:
            yield "data.hub_name is null, but data.source is hub; name a dataset, such as roneneldan/TinyStories."
        if self.source not in ("files", "shards") and (self.files or self.val_files):
            yield f"data.files and data.val_files require data.source files or shards, not {self.source}."


_KEYS_OF_A_TEXT = (
    *("source", "files", "hub_name", "hub_config", "hub_split", "streaming", "text_column", "ids_column"),
    *("messages_column", "encoding", "max_documents", "split", "val_fraction", "val_files", "val_bytes_files"),
)
"""The keys that an entry of data.mixture may have."""


class TokenizerSection(Section, frozen=True):
    """How text becomes tokens."""

    kind: Literal["bpe", "byte", "char", "pretrained"] = "bpe"
    """bpe: byte-level BPE trained on the training text; byte; char; pretrained: see tokenizer.name_or_path."""
    vocab_size: Annotated[int, Field(ge=257, le=2**24 - 1)] | Auto = "auto"
    """Size of a BPE vocabulary, including special tokens; auto: 4096, or as many as the text supports, and of less than
    200 kB only the 256 bytes. Ignored by byte, char and pretrained."""
    name_or_path: Text | None = None
    """A Hub name, a folder, or a file (tokenizer.json, SentencePiece *.model); implies tokenizer.kind pretrained."""
    case_operators: bool = False
    """With bpe: capital letters become operators and lower-case letters, without loss; see docs/experiments.md."""

    def _problems(self) -> Iterator[str]:
        if self.case_operators and self.kind != "bpe":
            yield f"tokenizer.case_operators: true requires tokenizer.kind bpe; the entries of {self.kind} are given."
        if self.kind == "pretrained" and not self.name_or_path:
            yield "tokenizer.name_or_path is null, but tokenizer.kind is pretrained; name a tokenizer, such as gpt2."

    @property
    def max_vocab_size(self) -> int:
        """Return the size of a BPE vocabulary if the text supports it."""
        return self.vocab_size if isinstance(self.vocab_size, int) else 4096


_KEYS_OF_ANY_ARCHITECTURE = (
    *("architecture", "overrides", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "tie_word_embeddings", "dropout", "attention_dropout", "gradient_checkpointing"),
    *("init_from", "max_position_embeddings", "vocab_size"),
)


class ModelSection(Section, frozen=True):
    """The model architecture: a modern block by default; docs/config.md has the options that make it GPT-2."""

    init_from: Text | None = None
    """Weights to start from, at step 0 with a new optimizer: a run (runs/small), a checkpoint, an exported folder or a
    Hub name. The architecture and the tokenizer are those of the weights; see docs/models.md."""
    architecture: Annotated[str, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$", description="golf, or a name")] = "golf"
    """golf, or any causal language model of transformers: a model type (llama, qwen3, gpt2, mamba, ...), which takes
    its shape and dropout from this section, or a folder or Hub name, which has the shape in its config.json; see
    docs/models.md."""
    overrides: Overrides = {}
    """Other fields of the architecture's own config, by their names there: {rms_norm_eps: 1e-5} for llama,
    {head_gate: 12} for golf. On the command line also one at a time: --model.overrides.head_gate 12."""
    hidden_size: Width = 256
    """Width of the residual stream."""
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of transformer blocks."""
    num_attention_heads: Width = 4
    """Number of query heads; must divide hidden_size."""
    num_key_value_heads: Count | None = None
    """Number of key and value heads (grouped-query attention); null: same as query heads."""
    intermediate_size: Width | None = None
    """Width of the MLP; null: 4 x hidden_size."""
    norm: Text = "rmsnorm"
    """Normalization before attention, before the MLP and before the head: rmsnorm or layernorm."""
    position_embedding: Text = "rope"
    """rope: rotary embedding; learned: GPT-2's position table; none."""
    max_position_embeddings: Positions | None = None
    """Longest sequence that the model is for, in tokens: a hard limit with learned positions; null: as long as
    batch.sequence_length."""
    vocab_size: Positions | None = None
    """Rows of the embedding; null: as many as the tokenizer has entries."""
    activation: Text = "relu2"
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
    dropout: Rate = 0.0
    """Dropout rate on the embedding and the residual branches."""
    attention_dropout: Rate = 0.0
    """Dropout rate on the attention weights; on a CPU it makes a step about 20 % slower."""
    induction_heads: Index = 2
    """Heads of the first two layers that start as induction heads, which copy what followed the same token before; at
    most as many as heads of keys. Only with rope, qk_norm and two layers or more; see docs/experiments.md."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory, costs about a third more compute."""

    def _problems(self) -> Iterator[str]:
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            near = _nearest_multiples(width, heads)
            yield f"model.hidden_size: {width} is not divisible by model.num_attention_heads {heads}; try {near}."
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            allowed = join_words(n for n in range(1, heads + 1) if heads % n == 0)
            yield (
                f"model.num_key_value_heads: {self.num_key_value_heads} does not divide"
                f" model.num_attention_heads {heads}; allowed: {allowed}."
            )
        of_golf = type(self).model_fields.items() if self.architecture != "golf" else ()
        for key, field in of_golf:
            if key not in _KEYS_OF_ANY_ARCHITECTURE and getattr(self, key) != field.default:
                yield (
                    f"model.{key}: it is an option of architecture golf, and model.architecture is {self.architecture};"
                    " leave its default, or use model.overrides."
                )


def model_key(name: str) -> str:
    """Return the key that sets a field of GolfConfig: of the section, or one of its overrides."""
    return f"model.{name}" if name in ModelSection.model_fields else f"model.overrides.{name}"


class BatchSection(Section, frozen=True):
    """How many tokens one optimizer step reads, and how they are divided into micro-batches."""

    sequence_length: Annotated[int, Field(ge=2, le=2**24)] = 256
    """Tokens per training sequence (the context length)."""
    tokens_per_step: Annotated[int, Field(ge=1, le=2**40)] = 4096
    """Tokens per optimizer step over all processes; gradient accumulation follows from it."""
    micro_batch_size: Count | Auto = "auto"
    """Sequences per forward pass of one process; auto: chosen to fit the predicted memory."""
    segment_length: Count | None = None
    """Tokens per segment: the first sequences of the training are made of segments from different places of the text,
    so that a step sees more of it; null: none are. model.init_from on the command line makes a file's value null."""
    segmented_tokens: Count | None = 1_000_000
    """Tokens of the training, counted from its start, that are read in segments; null: all. It has no effect without
    batch.segment_length."""

    def _problems(self) -> Iterator[str]:
        length, segment = self.sequence_length, self.segment_length
        if segment is not None and segment < length and length % segment:
            divisor = f"null, a divisor of batch.sequence_length {length}, or more than it (which changes nothing)"
            yield refusal("batch.segment_length", segment, divisor)
        if self.tokens_per_step % self.sequence_length:
            near = _nearest_multiples(self.tokens_per_step, self.sequence_length)
            yield (
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


class OptimSection(Section, frozen=True):
    """The optimizer. With muon, the hidden matrices use Muon and everything else uses AdamW."""

    name: Literal["muon", "adamw", "sgd"] = "muon"
    """muon: Muon for the hidden matrices, AdamW for the rest; adamw; sgd (with optim.momentum)."""
    learning_rate: Positive = 0.02
    """Peak learning rate: of the hidden matrices (muon), or of all parameters (adamw, sgd)."""
    adamw_learning_rate: Positive = 0.003
    """With muon: peak learning rate of norms, biases and an untied head."""
    embedding_learning_rate: Positive | None = None
    """Peak learning rate of the embeddings; null: same as the other AdamW parameters."""
    vector_learning_rate: Positive | None = None
    """Peak learning rate of norms, biases, gains and gates; null: same as the other AdamW parameters."""
    momentum: Rate = 0.95
    """Momentum of Muon and of SGD, in Nesterov's form."""
    momentum_warmup_steps: Index = 300
    """Steps over which Muon's momentum rises from optim.momentum_start to optim.momentum; SGD's is constant."""
    momentum_start: Rate = 0.85
    """Muon's momentum at the first step; optim.momentum if that is lower."""
    betas: Annotated[tuple[Rate, Rate], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates for the first and second moments."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of the matrices; multiplied by the group's learning rate."""
    embedding_weight_decay: NotNegative = 0.0
    """The same for the embeddings, and with them a tied head."""
    head_weight_decay: NotNegative = 0.0
    """The same for an untied head."""
    vector_weight_decay: NotNegative = 0.0
    """The same for norms, biases, gains and gates."""
    newton_schulz_coefficients: Literal["classic", "polar_express"] = "polar_express"
    """Polynomial for Muon's orthogonalization."""
    newton_schulz_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations per Muon update."""
    muon_every_steps: Count = 1
    """N: update each matrix every N steps, with N times the learning rate, so that Muon takes less time per step. The
    matrices take turns, and momentum still follows every gradient. Over the same steps, 2 ends about 0.006 nats per
    token higher than 1; over the same minutes, it can end lower."""
    newton_schulz_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the Newton-Schulz products; auto: fp32 if train.mixed_precision is no, or if the hardware is not
    fast at bf16, else bf16."""
    update_scale: Literal["original", "match_rms_adamw"] = "original"
    """Scale of Muon's update. original: sqrt(max(1, rows/columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns)),
    which works with AdamW's learning rates."""
    row_equilibration: bool = True
    """Divide each row by its norm before orthogonalization (MuonEq-R)."""
    normuon_beta2: Rate | None = 0.95
    """Decay rate of NorMuon's running mean square per row, which normalizes the rows of the update; null: off."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the optimizer keeps momentum and moments between steps. bf16 halves their memory; it needs
    momentum and betas of at most 0.98."""
    cautious_weight_decay: bool = False
    """Apply weight decay only to weights that the update moves toward 0."""
    ema_decay: Rate | None = None
    """Decay per step of the exponential moving average (EMA) of the weights, whose mean age is 1 / (1 - decay) steps,
    but at most a tenth of all so far; null: no EMA. It lowers the loss where a text is read three times or more."""
    ema_export: bool = False
    """Evaluate and export the averaged weights instead of the raw ones; else, they are evaluated, too."""

    def _problems(self) -> Iterator[str]:
        if self.newton_schulz_coefficients == "polar_express" and self.newton_schulz_steps > 5:
            allowed = "at most 5 with optim.newton_schulz_coefficients polar_express"
            yield refusal("optim.newton_schulz_steps", self.newton_schulz_steps, allowed)
        for name, largest in (("momentum", self.momentum), ("betas", max(self.betas))):
            if self.state_dtype == "bf16" and largest > 0.98:
                yield refusal(f"optim.{name}", largest, "at most 0.98 with optim.state_dtype bf16")
        if self.ema_export and self.ema_decay is None:
            yield "optim.ema_export is true, but there is no EMA; set optim.ema_decay."


class ScheduleSection(Section, frozen=True):
    """How learning rates and weight decay change over the run, as fractions of their peaks."""

    name: ScheduleName = "wsd"
    """linear and cosine decay from the end of the warmup; wsd decays over the last schedule.warmdown_fraction of the
    run; cosine_warmdown is cosine times a factor that falls from 1 to 0 over that last part."""
    warmup_steps: Index = 0
    """Steps over which the learning rate rises linearly to its peak."""
    warmdown_fraction: Fraction = 0.4
    """Last fraction of the run, in which wsd decays to the floor and cosine_warmdown to 0."""
    floor: Fraction = 0.0
    """Final learning rate as a fraction of the peak; for cosine_warmdown, the floor of its cosine."""
    weight_decay: Literal["constant", "linear", "learning_rate"] = "constant"
    """Schedule of optim.weight_decay: constant, linear to 0 over the run, or the schedule of the learning rate."""
    loop_start: Rate = 0.0
    """Fraction of the run after which model.overrides.loop begins; until then the layers run once each."""


class TrainSection(Section, frozen=True):
    """How long to train, in which precision, and how often to log, evaluate and save."""

    max_steps: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Optimizer steps. The run ends at whichever limit comes first: max_steps, max_tokens, max_epochs, max_minutes."""
    max_tokens: Count | None = None
    """Training tokens, rounded up to whole steps."""
    max_epochs: Positive | None = None
    """Passes over the training data."""
    max_minutes: Positive | None = None
    """Minutes of training, including compilation and evaluation; the schedule then spans these minutes."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """null: the setting of `accelerate` if there is one, else bf16 if the hardware is fast at it, else fp16 on a GPU of
    compute capability 7 (V100, T4), else no (fp32)."""
    compile: Auto | bool = "auto"
    """Use torch.compile; auto: if a compiler is available and the run is long enough to pay for compiling."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Threads per CPU process; auto: divide the cores among the processes (`accelerate launch` would set 1)."""
    low_memory: bool = False
    """Train in less memory and more time: sets model.gradient_checkpointing true and optim.state_dtype bf16 unless they
    are stated, and on a CPU returns large blocks of memory at once."""
    distill_from: Texts = []
    """Folders of complete runs on the same text: half of the training loss then is the cross-entropy to the mean of
    what their models say. It pays where a text is read many times; each of them adds a third to the time of a step.
    Without a config, the run has that of the first with another run.seed, and makes as many steps."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global gradient norm to this value; null: only measure it."""
    log_every_steps: Count = 10
    """Log one row to metrics.jsonl every N steps."""
    eval_every_steps: Count = 250
    """Evaluate every N steps, and always at the last step."""
    eval_tokens: Count | Auto | None = "auto"
    """Validation tokens per evaluation during the run; null: all; auto: as many as take 5 % of the compute of the steps
    between two evaluations, or of a shorter run, but at least 4096."""
    final_eval_tokens: Count | Auto | None = "auto"
    """Validation tokens of the evaluation at the last step, whose figures are those of the model; null: all; auto: as
    many as take 5 % of the compute of the training. Never fewer than train.eval_tokens."""
    sample_tokens: Count | None = 64
    """Tokens to sample from the model at each evaluation, for metrics.jsonl, trackers and the report; null: none."""
    sample_prompt: Text = ""
    """Text that these samples, and the longer one at the end of the run, continue; empty: they start a document. With
    conversations, the model answers the first validation prompt instead."""
    save_every_steps: Count | None = 500
    """Save a checkpoint every N steps; null: steps trigger none. The last step always saves one."""
    save_every_minutes: Positive | None = 10.0
    """Also save a checkpoint when the last one is this many minutes old; null: time triggers none."""
    keep_last: Count = 2
    """Newest checkpoints to keep, in addition to the best one."""
    milestones: Milestones = []
    """Export the model once the training has read so much, such as [10M, 1.5B tokens, 100M words], to the run's folder
    milestones/ and with hub.push to a branch of the same name: chck_100M for words, chck_10M_tokens for tokens, which
    an amount without a unit means. train.keep_last does not delete them; see docs/sharing.md."""
    resume: Text | None = None
    """auto: resume the run, or start it if there is no checkpoint; latest, best or a path: resume from that
    checkpoint; null: start a new run."""
    resume_with_other: Literal["data"] | None = None
    """data: allow a resume to change the text, split, seed or sequence length; null: refuse."""
    patience_evals: Count | None = None
    """Stop after N evaluations without improvement; null: never. The best weights are exported either way."""
    max_skipped_steps: Count = 5
    """Consecutive steps with a nonfinite gradient to skip before rolling back to the last checkpoint; overflows of
    fp16's loss scaling do not count."""
    rollback_on: Triggers = ["nonfinite"]
    """What triggers a rollback, as a list: nonfinite gradients; a loss spike (20 % or more above the usual loss, for
    train.max_skipped_steps steps); divergence (the median of 50 losses is 20 % above its lowest value, or 10 %
    above the first loss)."""
    max_rollbacks: Index = 3
    """Rollbacks allowed; after that the run stops with a diagnosis. Each excludes the bad batches and halves all
    learning rates."""
    deterministic: bool = False
    """Use deterministic GPU kernels (slower); a run on one CPU process is always reproducible."""

    def _problems(self) -> Iterator[str]:
        if all(limit is None for limit in (self.max_steps, self.max_tokens, self.max_epochs, self.max_minutes)):
            yield (
                "train: the run has no limit; set train.max_steps, train.max_tokens, train.max_epochs or"
                " train.max_minutes."
            )
        names = [milestone(entry).name for entry in self.milestones]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield f"train.milestones: two entries are named {twice}; leave one out."


class TrackSection(Section, frozen=True):
    """Trackers that get a copy of metrics.jsonl."""

    trackers: Texts = []
    """Trackers that Accelerate supports: trackio, wandb, tensorboard, ...; see docs/running.md."""
    project: Text = "hfgolf"
    """Project name in the tracker."""
    offline: bool = False
    """Keep trackers with an account offline, to upload later (with `wandb sync`, for example)."""


class HubSection(Section, frozen=True):
    """Pushing the model to the Hugging Face Hub."""

    push: bool = False
    """Push the model to the Hub when the run ends."""
    repo_id: Repository | None = None
    """Repository, as user/name."""
    private: bool = False
    """Create the repository as private."""
    every_steps: Count | None = None
    """Also push every N steps; null: only at the end."""
    format: Literal["auto", "golf", "native"] = "auto"
    """native: an architecture of transformers with the same logits, which loads without trust_remote_code; refused if
    there is none. golf: with hfgolf's modeling code. auto: native if there is one, as in the run folder."""
    license: License | None = None
    """License of the weights for the model card, by the Hub's name, such as apache-2.0 or other; null: the card names
    none."""
    language: Languages = []
    """Languages of the text for the model card: codes of ISO 639 such as en or deu, also code and multilingual."""

    def _problems(self) -> Iterator[str]:
        if self.push and not self.repo_id:
            yield "hub.repo_id is null, but hub.push is true; name the repository, as user/name."


class GolfSection(Section, frozen=True):
    """A model in a number of bytes: `hfgolf golf export` rounds its matrices and codes the integers."""

    budget_bytes: Bytes | None = None
    """Bytes that the model may take, of what golf.count counts; null: pass the number to `hfgolf golf export`."""
    count: Literal["challenge", "everything"] = "challenge"
    """What counts toward the budget. challenge: the program and the weights; everything: also the packed tokenizer and
    config."""
    method: Literal["gptq", "nearest"] = "gptq"
    """gptq: pass the error of each rounded weight on to the columns and rows that follow, then change integers one at a
    time where that lowers the loss; nearest: neither."""
    allocation: Literal["curvature", "sdclip", "uniform"] = "curvature"
    """Steps of the grid. curvature: finer if the loss is more sensitive; sdclip: proportional to the row's standard
    deviation; uniform: the same for all weights."""
    calibration_tokens: Count = 32768
    """Training tokens from which the curvature is measured."""
    forecast_every_steps: Count | None = None
    """Forecast every N steps of a run, and at the last one, what an export would take; null: never."""
    qat_fraction: Fraction = 0.0
    """Last fraction of a run that trains with its matrices rounded to the grid that golf.budget_bytes allows."""
    evaluation: Literal["flat", "sliding", "documents"] = "flat"
    """How an export is scored. flat: rows end to end; sliding: overlapping windows, so that each token has context;
    documents: sliding windows that never cross a separator."""
    stride: Count | None = None
    """Tokens that each window scores, of sliding and documents; null: all of it."""
    adapt_rate: Rate = 0.0
    """Test-time training: learn from each window once it is scored, at this rate; 0: don't."""

    def _problems(self) -> Iterator[str]:
        if self.qat_fraction and self.budget_bytes is None:
            yield "golf.budget_bytes is null, but golf.qat_fraction is set; state the bytes to train for."
        if self.stride and self.evaluation == "flat":
            yield "golf.stride needs golf.evaluation sliding or documents, but it is flat."


class RunConfig(Section, frozen=True):
    """The whole config of a run, as `configs/*.yaml` and the command line describe it."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    tokenizer: TokenizerSection = TokenizerSection()
    model: ModelSection = ModelSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection(max_steps=1000)
    track: TrackSection = TrackSection()
    hub: HubSection = HubSection()
    golf: GolfSection = GolfSection()

    def _problems(self) -> Iterator[str]:
        if self.schedule.loop_start and self.model.overrides.get("loop") is None:
            yield "schedule.loop_start: it needs model.overrides.loop; set that, or leave it 0."
        if self.data.old_text and self.model.init_from is None:
            yield "data.old_text requires model.init_from: other weights know no text yet."
        for key in ("qat_fraction", "forecast_every_steps"):
            if self.model.architecture != "golf" and getattr(self.golf, key):
                yield f"golf.{key}: it needs model.architecture golf, not {self.model.architecture}."
        texts = self.data.sources().values()
        ready = next((text for text in texts if text.source == "shards" or text.ids_column is not None), None)
        if ready and self.tokenizer.kind not in ("pretrained", "byte") and self.model.init_from is None:
            source = "source shards" if ready.source == "shards" else "ids_column"
            yield (
                f"tokenizer.kind: {self.tokenizer.kind} is trained on text, but data.{source} has only tokens; set"
                " pretrained and tokenizer.name_or_path, or byte."
            )
        if self.batch.is_segmented and self.data.order == "sequential":
            yield (
                f"batch.segment_length: {self.batch.segment_length} reads the text in another order than data.order"
                " sequential; set batch.segment_length null, or data.order shuffled."
            )
        positions = self.model.max_position_embeddings
        if self.model.position_embedding == "learned" and positions and self.batch.sequence_length > positions:
            yield (
                f"batch.sequence_length: {self.batch.sequence_length} is longer than the {positions} learned positions"
                " of model.max_position_embeddings; make it shorter."
            )
        if self.data.messages_column is not None:
            yield from self._problems_of_chat()
        if self.data.mixture and self.train.max_epochs:
            yield "train.max_epochs: each text of data.mixture has epochs of its own; state train.max_tokens."
        for key in ("mixture", "messages_column"):
            if getattr(self.data, key) and (self.golf.qat_fraction or self.golf.forecast_every_steps):
                yield f"golf.qat_fraction and golf.forecast_every_steps do not go with data.{key}; leave them unset."
        if self.golf.qat_fraction and self.optim.ema_export:
            yield "optim.ema_export: true does not go with golf.qat_fraction: averages are on no grid; drop one."

    def _problems_of_chat(self) -> Iterator[str]:
        if self.tokenizer.kind == "bpe" and self.tokenizer.max_vocab_size < 261:
            yield (
                f"tokenizer.vocab_size: {self.tokenizer.vocab_size} is too small for data.messages_column, which needs"
                " 256 bytes and 5 special tokens; set 261 or more."
            )
        if self.model.overrides.get("attention_span") == "document" and self.tokenizer.kind == "pretrained":
            yield (
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
        every = min(self.train.eval_every_steps, self.train.max_steps or self.train.eval_every_steps)
        return budgeted_eval_tokens(self.batch.tokens_per_step * every, self.eval_passes)

    def final_eval_tokens(self, trained_tokens: int) -> int | None:
        """Return train.final_eval_tokens, decided if it is auto, of a run that has trained on so many tokens."""
        stated, each = self.train.final_eval_tokens, self.eval_tokens
        if stated is None or each is None:
            return None
        return max(each, budgeted_eval_tokens(trained_tokens, self.eval_passes) if stated == "auto" else stated)

    @property
    def eval_passes(self) -> int:
        """Return how many passes an evaluation makes: for the weights, their averages, and data.old_text."""
        return 1 + (self.optim.ema_decay is not None and not self.optim.ema_export) + bool(self.data.old_text)

    @property
    def order_seed(self) -> int | None:
        """Return the seed of the order of the data; None: sequential."""
        return None if self.data.order == "sequential" else self.run.seed

    def flat(self) -> dict[str, Any]:
        """Return the config as {"section.key": value}."""
        return {f"{name}.{key}": value for name, section in self for key, value in section}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Self:
        """Return the config with these values of {"section.key": value}, and the defaults of each section."""
        nested: dict[str, Any] = {section: {} for section in SECTIONS}
        for key, value in values.items():
            section, name = key.split(".")
            nested[section][name] = value
        return cls(**{section: SECTIONS[section](**keys) for section, keys in nested.items()})

    def replace(self, **values: Any) -> Self:
        """Return a copy with each `section__key=value` replaced and checked."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, key = name.split("__")
            changes.setdefault(section, {})[key] = value
        return super().replace(**{name: getattr(self, name).replace(**keys) for name, keys in changes.items()})


SECTIONS: dict[str, type[Any]] = key_types(RunConfig)
KEY_TYPES: dict[str, Any] = {
    f"{name}.{key}": kind for name, section in SECTIONS.items() for key, kind in key_types(section).items()
}
