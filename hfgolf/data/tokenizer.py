"""Tokenizers as `PreTrainedTokenizerFast` objects: byte, char and BPE, built and trained here, or a pretrained one.

The three built here work on UTF-8 bytes, like GPT-2's. Any text decodes back to exactly itself, even text unlike the
training text, and there is no unknown token. Text that spells `<|endoftext|>` is encoded as plain text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfgolf.config.sections import TokenizerSection
from hfgolf.data.cache_folder import read_manifest, write_manifest
from hfgolf.data.case_operators import OPERATORS, add_case_operators, has_case_operators
from hfgolf.data.chat import CHAT_TOKENS, add_chat_template, encoding_error
from hfgolf.data.downloads import is_cached_only
from hfgolf.data.pieces import evenly_sampled, num_text_bytes, texts
from hfgolf.data.sentencepiece_model import SPACE, load_sentencepiece
from hfgolf.system.durable import find_damage, new_folder
from hfgolf.system.errors import UserError
from hfgolf.system.wording import first_line, join_words, shortened

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger(__name__)

_BYTE_ENTRY = re.compile(r"<0x[0-9A-Fa-f]{2}>")
END_OF_TEXT = "<|endoftext|>"
# In tokenizer_config.json: "text" if documents begin as the tokenizer itself begins a text, with <s> for example. A run
# that an older version of hfgolf started has "separator": its documents begin with the separator alone.
_DOCUMENTS_BEGIN = "documents_begin"
# Candidates for a pretrained tokenizer that does not declare an eos_token.
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
# The BPE trainer keeps every distinct word and its count in memory, and reads 1 to 2 MB/s per core. More text than this
# is sampled evenly. (Pieces have a bounded length, so no single document becomes a huge list of words either.)
TRAINING_SAMPLE_BYTES_PER_ENTRY = 4096
FEW_BYTES = 200_000  # from here on, most text supports 4,096 entries
_FORMAT_VERSION = 1

Encoded = tuple[np.ndarray, list[int]]
"""The concatenated ids of several texts, uint32, and the number of ids of each text."""
Encoder = Callable[[list[str]], Encoded]


class TooFewEntriesError(UserError):
    """The train split is too small for the wanted BPE vocabulary: training stopped at `reached` entries."""

    def __init__(self, wanted: int, reached: int) -> None:
        self.reached = reached
        super().__init__(
            f"tokenizer.vocab_size: {wanted} is too large for this corpus, whose train split supports only {reached}"
            f" entries; set {reached} or less, or add text."
        )


def build_tokenizer(
    config: TokenizerSection, corpus_identity: dict[str, Any], train_pieces: Callable[[], Dataset], folder: Path
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `config` describes, training it on the train split if its kind needs that.

    Trained tokenizers are kept in `folder`, keyed by corpus and settings. `train_pieces` is called only on a miss.

    Raises UserError if the corpus is too small for the vocabulary, or a pretrained tokenizer is unusable.
    """
    found = find_tokenizer(config, corpus_identity, folder)
    if found is not None:
        return found
    path = _tokenizer_path(config, corpus_identity, folder)
    if path.exists():
        _log.info("tokenizer damaged: %s (%s); training it again", path, _problem(path))
    pieces = train_pieces()
    is_chat = "messages_column" in corpus_identity
    tokenizer = _wrap(_train_char(pieces) if config.kind == "char" else _train_bpe(pieces, config, is_chat))
    if is_chat:
        add_chat_template(tokenizer)
    with new_folder(path) as partial:
        tokenizer.save_pretrained(partial)
        write_manifest(partial)
    return _load(path)  # from disk, like every later start


def mixed_pieces(texts: Sequence[Dataset], shares: Sequence[float], config: TokenizerSection) -> Dataset:
    """Return what the tokenizer of a mixture is trained on: of BPE's sample, each text has its share, if it is so long.

    A char tokenizer needs all characters, so it reads all.
    """
    from datasets import concatenate_datasets

    if config.kind == "char":
        return concatenate_datasets([*texts])
    # less than _train_bpe takes: of a sample that is a little too large, it would take half
    sample_bytes = 0.9 * config.max_vocab_size * TRAINING_SAMPLE_BYTES_PER_ENTRY
    samples = (
        evenly_sampled(text, max(1, int(share * sample_bytes))) for text, share in zip(texts, shares, strict=True)
    )
    return concatenate_datasets([text.select(sample) for text, sample in zip(texts, samples, strict=True)])


def find_tokenizer(
    config: TokenizerSection, corpus_identity: dict[str, Any], folder: Path
) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer that `config` describes, or None if it would have to be trained first."""
    if config.kind in ("bpe", "char"):
        path = _tokenizer_path(config, corpus_identity, folder)
        return _load(path) if _problem(path) is None else None
    is_byte = config.kind == "byte"
    tokenizer = _wrap(byte_level_tokenizer([])) if is_byte else _load_pretrained(str(config.name_or_path))
    if "messages_column" in corpus_identity and tokenizer.chat_template is None:
        add_chat_template(tokenizer)
        if not is_byte:
            where, tokens = f"tokenizer.name_or_path: {config.name_or_path!r}", join_words(CHAT_TOKENS)
            size = f"{embedding_rows(tokenizer)} entries"
            _log.info("%s has no chat template; it gets one, with %s in its vocabulary (%s)", where, tokens, size)
    return tokenizer


def _problem(path: Path) -> str | None:
    try:
        return find_damage(path, read_manifest(path)["files"])
    except ValueError as error:
        return str(error)


def build_encoder(tokenizer: PreTrainedTokenizerFast, kind: str) -> Encoder:
    """Return a function that encodes a list of texts on all cores.

    It adds no special tokens, and encodes text that spells a special token as plain text. kind: config.tokenizer.kind.

    Raises UserError for a text that the tokenizer cannot encode, or makes a separator of.
    """
    if kind == "byte":
        return _encode_bytes
    backend = _text_only(tokenizer)
    start = document_start(tokenizer)

    def encode(texts: list[str]) -> Encoded:
        try:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # a panic of the library is no Exception
            raise encoding_error(backend, texts, error) from error
        ids = array("I")  # reads a list twice as fast as numpy
        for encoding in encodings:
            ids.fromlist(encoding.ids)
        found = np.frombuffer(ids, np.uint32)
        if (begins := np.isin(found, start)).any():
            text = next(text for text, one in zip(texts, encodings, strict=True) if not set(start).isdisjoint(one.ids))
            name = tokenizer.convert_ids_to_tokens(int(found[begins][0]))
            raise UserError(
                f"tokenizer: {name}, which begins documents, is also what it makes of text that it does not know, such"
                f" as {shortened(text)}; name a tokenizer with another unk_token."
            )
        return found, list(map(len, encodings))

    return encode


def _text_only(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a tokenizer's rules without its special tokens: their ids remain, under names that no text spells.

    The model of a tokenizer knows them as well: Unigram, WordLevel and WordPiece would find `</s>` in a text even if
    nobody looks for special tokens.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules |= {"padding": None, "truncation": None, "post_processor": None}
    model, secret = rules["model"], uuid.uuid4().hex
    begins = set(tokenizer.convert_ids_to_tokens(document_start(tokenizer)))
    special = {token["content"] for token in rules["added_tokens"] if token["special"]}
    special |= begins.union(tokenizer.all_special_tokens)
    # a special token of one character, such as a "!" for padding, is also what spells that character
    renamed = {token: token + secret for token in special if token in begins or len(token) > 1}
    for token in rules["added_tokens"]:
        token |= {"content": renamed.get(token["content"], token["content"]), "special": token["content"] in special}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(entry, entry): number for entry, number in vocab.items()}
    else:  # Unigram's
        model["vocab"] = [[renamed.get(entry, entry), score] for entry, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        mark = model.get("continuing_subword_prefix") or ""
        pairs = model["merges"]
        model["merges"] = [[a, b] for a, b in pairs if renamed.keys().isdisjoint((a, b, a + b.removeprefix(mark)))]
    backend = Tokenizer.from_str(json.dumps(rules))
    backend.encode_special_tokens = True
    return backend


def document_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that begin each document: the separator, and what the tokenizer itself puts in front of a text.

    So weights that know `<s>` at the start of a text (Llama, Gemma) find it there: `</s><s>text</s><s>text`.
    """
    separator = int(tokenizer.eos_token_id)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.init_kwargs.get(_DOCUMENTS_BEGIN) == "separator":
        return [separator]
    return [separator, *(number for number in added_around(tokenizer)[0] if number != separator)]


def text_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a prompt follows: those of `document_start` after the separator, or else the separator."""
    start = document_start(tokenizer)
    return start[1:] or start


def added_around(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts in front of a text and after it, by its post-processor."""
    word = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")  # which no vocabulary has to know
    encoding = tokenizer.backend_tokenizer.post_process(word)
    place = encoding.special_tokens_mask.index(0)
    ids, is_padding = np.array(encoding.ids), np.array(encoding.attention_mask) == 0
    return ids[:place][~is_padding[:place]].tolist(), ids[place + 1 :][~is_padding[place + 1 :]].tolist()


def keep_old_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    """Have documents begin as in the run that saved this tokenizer: by the separator alone, if it says nothing else."""
    if len(document_start(tokenizer)) > 1:
        tokenizer.init_kwargs.setdefault(_DOCUMENTS_BEGIN, "separator")


def embedding_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the rows that an embedding needs: the largest id + 1, also if some ids below it have no entry.

    Raises UserError if most of them have none.
    """
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    if largest >= 2 * len(vocabulary):
        raise UserError(
            f"The tokenizer has id {largest}, but only {len(vocabulary)} entries. Its files are inconsistent: load or"
            " train another tokenizer."
        )
    return int(largest) + 1


def _encode_bytes(texts: list[str]) -> Encoded:
    encoded = [text.encode() for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), list(map(len, encoded))


def decode_texts(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> list[str]:
    """Return the texts that were encoded, as far as the tokenizer restores them."""
    ids, num_ids = encoded
    ids_of_texts = [text_ids.tolist() for text_ids in np.split(ids, np.cumsum(num_ids)[:-1])]
    return tokenizer.backend_tokenizer.decode_batch(ids_of_texts, skip_special_tokens=False)


def find_tokenizer_loss(tokenizer: PreTrainedTokenizerFast, texts: list[str], encoded: Encoded) -> str | None:
    """Return a message, with the share of characters lost, if decoding does not restore the texts; otherwise None.

    Characters that a tokenizer drops, lowercases or normalizes cost no bits, so bits per byte would flatter its model.
    encoded: the texts as encoded by this tokenizer.
    """
    decoded = decode_texts(tokenizer, encoded)
    # SentencePiece adds and removes a leading space, or keeps an existing one. Do not count that as a loss.
    pairs = [(text.removeprefix(" "), back.removeprefix(" ")) for text, back in zip(texts, decoded, strict=True)]
    if all(text == back for text, back in pairs):
        return None
    lost = sum((Counter(text) - Counter(back)).total() for text, back in pairs)
    found = "a sample is decoded to another text"  # with more spaces, for example
    if lost:
        share = lost / sum(len(text) for text, _ in pairs)
        found = f"{share:.2%} of the characters in a sample are lost or changed"
    return f"the tokenizer is not lossless ({found}); bits per byte is not comparable"


def entry_spellings(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """Return the UTF-8 bytes that each entry of a vocabulary spells, (V,); special tokens spell none.

    Byte-level entries spell one byte per character, case operators none. In SentencePiece's, U+2581 is a space and
    <0x0A> is one byte.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps(rules["decoder"])
    spelled_by = {symbol: bytes([byte]) for byte, symbol in bytes_to_unicode().items()}
    if has_case_operators(tokenizer.backend_tokenizer):
        spelled_by |= {bytes_to_unicode()[ord(operator)]: b"" for operator in OPERATORS}
    spellings = [b""] * embedding_rows(tokenizer)
    added = {token["id"]: token for token in rules["added_tokens"]}
    for entry, number in tokenizer.get_vocab().items():
        if number in added:
            spellings[number] = b"" if added[number]["special"] else entry.encode()
        elif is_byte_level and spelled_by.keys() >= set(entry):
            spellings[number] = b"".join(map(spelled_by.__getitem__, entry))
        else:
            is_byte = _BYTE_ENTRY.fullmatch(entry)
            spellings[number] = bytes([int(entry[3:5], 16)]) if is_byte else entry.replace(SPACE, " ").encode()
    for number in document_start(tokenizer):
        spellings[number] = b""
    return spellings


def entry_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the number of bytes that each entry of a vocabulary spells, (V,) int64; see entry_spellings."""
    return np.array([*map(len, entry_spellings(tokenizer))], np.int64)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of tokenizer.json: vocabulary, merges and rules."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _tokenizer_path(config: TokenizerSection, corpus_identity: dict[str, Any], folder: Path) -> Path:
    vocab_size = config.vocab_size if config.kind == "bpe" else None
    options = ["case_operators"] if config.case_operators else []
    key = json.dumps([_FORMAT_VERSION, config.kind, vocab_size, corpus_identity, *options], sort_keys=True)
    return folder / f"{config.kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _load(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)


def _load_pretrained(name_or_path: str) -> PreTrainedTokenizerFast:
    where = f"tokenizer.name_or_path: {name_or_path!r}"
    path = Path(os.path.expanduser(name_or_path))
    tokenizer: Any
    missing = f"{where} has no tokenizer, such as tokenizer.json; save that of its model there."
    if path.is_dir() and not any(any(path.glob(files)) for files in ("*token*", "*.model", "vocab*", "*tekken*")):
        raise UserError(missing)
    try:
        if path.is_file() and path.suffix == ".model":
            tokenizer = load_sentencepiece(path)
        elif path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            cached_only = is_cached_only(name_or_path, "tokenizer_config.json")
            tokenizer = AutoTokenizer.from_pretrained(
                name_or_path,
                config=_placeholder(name_or_path, cached_only),
                trust_remote_code=False,  # explicit: else transformers asks on stdin whether to run a tokenizer's code
                local_files_only=cached_only,
            )
    except UserError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, ...: depends on what is broken
        advice = "check the name or folder and the network"
        if path.is_file():
            advice = "name a tokenizer.json or a SentencePiece *.model"
        raise UserError(f"{where} cannot be loaded ({first_line(error)}); {advice}.") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{where} has no tokenizer.json; hfgolf needs a fast tokenizer.")
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():  # transformers made an empty one
        raise UserError(missing)
    front, back = added_around(tokenizer)
    if tokenizer.eos_token_id is None:
        known = [n for n in (*tokenizer.convert_ids_to_tokens(back[-1:]), *_KNOWN_ENDS) if n in tokenizer.get_vocab()]
        tokenizer.add_special_tokens({"eos_token": known[0] if known else END_OF_TEXT})
        added = f"{tokenizer.eos_token} of its vocabulary" if known else f"{END_OF_TEXT}, added to its vocabulary"
        size = f"id {tokenizer.eos_token_id}, {embedding_rows(tokenizer)} entries"
        _log.info("%s has no eos_token; documents are separated by %s (%s)", where, added, size)
    entries = tokenizer.get_vocab()
    taken = Counter(entries.values())
    if unknown := [number for number in front + back if number not in taken]:
        raise UserError(
            f"{where} puts id {unknown[0]} around a text, which no entry of its vocabulary has: its files are"
            " inconsistent; load another tokenizer."
        )
    if twice := sorted((number, entry) for entry, number in entries.items() if taken[number] > 1):
        both = join_words((repr(entry) for number, entry in twice if number == twice[0][0]), maximum=2)
        raise UserError(
            f"{where} has the same id {twice[0][0]} for {both}: a special token that is not in its vocabulary got an id"
            " that is; add that token to the vocabulary."
        )
    if others := [number for number in back if number != tokenizer.eos_token_id]:
        _log.warning(
            "%s puts %s after each text; documents end with %s alone, so leave the others out of prompts",
            where,
            join_words(tokenizer.convert_ids_to_tokens(others)),
            tokenizer.eos_token,
        )
    if set(front) - {tokenizer.eos_token_id}:
        tokenizer.init_kwargs.setdefault(_DOCUMENTS_BEGIN, "text")
    return tokenizer


def _placeholder(name_or_path: str, cached_only: bool) -> PreTrainedConfig | None:
    """Return an empty config for a model whose config needs code, which never runs. transformers would warn of it."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(name_or_path, local_files_only=cached_only)
    except OSError:  # a tokenizer without a model
        return None
    return PreTrainedConfig() if "AutoConfig" in config.get("auto_map", {}) else None


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,  # True would remove spaces before punctuation when decoding
        split_special_tokens=True,  # text that spells a special token stays text
    )


def byte_level_tokenizer(characters: list[str]) -> Tokenizer:
    """Return a tokenizer without merges. Ids are the byte values, then `characters`, then the end-of-text token."""
    symbols = [symbol for _, symbol in sorted(bytes_to_unicode().items())]  # GPT-2's printable character for each byte
    words = ["".join(symbols[byte] for byte in character.encode()) for character in characters]
    vocab = {word: number for number, word in enumerate([*symbols, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))  # a word in vocab is a token
    tokenizer.add_special_tokens([END_OF_TEXT])  # not in vocab, where text that spells it would be looked up
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Split off only non-ASCII characters: a regex that matches every character is 5 times as slow.
    others = pre_tokenizers.Split(Regex(r"[^\x00-\x7F]"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([others, byte_level]) if characters else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train_char(pieces: Dataset) -> Tokenizer:
    """Return a tokenizer with one entry per character of the text.

    Its vocabulary is the 256 bytes (which include ASCII), the other characters seen, and the end-of-text token. An
    unseen character, in validation or in a prompt, is encoded as its bytes, not as an unknown token that cannot be
    decoded. The unused bytes cost a few rows of the embedding, and nothing in bits per byte once learned.
    """
    seen: set[str] = set()
    for text in texts(pieces):
        seen.update(text)
    return byte_level_tokenizer(sorted(character for character in seen if ord(character) >= 128))


def _train_bpe(pieces: Dataset, config: TokenizerSection, is_chat: bool) -> Tokenizer:
    """Train byte-level BPE with GPT-2's pre-tokenizer to config.vocab_size entries, including all special tokens.

    is_chat: leave room for CHAT_TOKENS.
    """
    num_reserved = len(CHAT_TOKENS) if is_chat else 0
    vocab_size = config.max_vocab_size - num_reserved
    if config.vocab_size == "auto" and (num_bytes := num_text_bytes(pieces)) < FEW_BYTES:
        vocab_size = 257  # the bytes and the end of text
        _log.info("tokenizer: bytes, because there are only %s kB of training text", f"{num_bytes / 1000:,.1f}")
    tokenizer, trainer = _untrained_bpe(vocab_size)
    if config.case_operators:
        add_case_operators(tokenizer)
    sample = pieces.select(evenly_sampled(pieces, vocab_size * TRAINING_SAMPLE_BYTES_PER_ENTRY))
    started_at = time.perf_counter()
    tokenizer.train_from_iterator(texts(sample), trainer)
    seconds = time.perf_counter() - started_at
    if vocab_size > 257:
        _log.debug("trained a BPE tokenizer on %.1f MB in %.1f s", num_text_bytes(sample) / 1e6, seconds)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size and config.vocab_size != "auto":
        raise TooFewEntriesError(config.vocab_size, reached + num_reserved)
    if reached < vocab_size:
        _log.info("tokenizer: %s entries, all that this text supports", f"{reached + num_reserved:,}")
    return tokenizer


def _untrained_bpe(vocab_size: int) -> tuple[Tokenizer, trainers.BpeTrainer]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return tokenizer, trainer


_COUNTED = 4096  # characters


def tokens_per_byte(sample: list[str], vocab_sizes: Collection[int]) -> dict[int, float]:
    """Return {vocab_size: tokens per byte} of the BPE vocabularies that a sample supports, and a tenth more entries.

    Trains the largest; the first merges of it are a smaller one. Counts the tokens of every eighth part of a large one.
    """
    tokenizer, trainer = _untrained_bpe(round(1.1 * max(vocab_sizes)))
    tokenizer.train_from_iterator(sample, trainer)
    content = json.loads(tokenizer.to_str())
    entries, merges = content["model"]["vocab"], content["model"]["merges"]
    text, ratios = "".join(sample), dict[int, float]()
    step = _COUNTED * (8 if len(text) > 2**18 else 1)
    counted = [text[start : start + _COUNTED] for start in range(0, len(text), step)]
    num_bytes = sum(len(part.encode()) for part in counted)
    for size in sorted(size for size in vocab_sizes if 257 < size <= len(entries) / 1.1 + 1):
        first = {entry: number for entry, number in entries.items() if number < size}
        content["model"] |= {"vocab": first, "merges": [pair for pair in merges if "".join(pair) in first]}
        encoded = Tokenizer.from_str(json.dumps(content)).encode_batch_fast(counted)
        ratios[size] = sum(len(encoding) for encoding in encoded) / num_bytes
    return ratios
