"""The certificate of a score: proof that its bits per byte are those of the raw text, each token scored once.

Owns six checks (see `certify`). Knows no model: a certificate says that nats on these tokens may be divided by these
bytes, not that the nats are right (legality.py guards a scorer).
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from hfgolf.data.batches import Stream
from hfgolf.data.cache_folder import cache_folder
from hfgolf.data.corpus import Corpus
from hfgolf.data.pieces import ROWS_PER_BATCH
from hfgolf.data.token_cache import TokenCache
from hfgolf.data.tokenizer import document_start, embedding_rows, tokenizer_sha256
from hfgolf.evaluate.token_bytes import bytes_per_token, challenge_bytes
from hfgolf.evaluate.windows import IGNORED, Plan, as_fp64, score
from hfgolf.system.durable import write_text
from hfgolf.system.errors import UserError
from hfgolf.system.wording import count_of

Searched = Literal["training", "calibration"]
"""The text that was searched for validation documents."""
_SAMPLED_PIECES = 1000  # decoded token by token: some two million tokens, in seconds
_SHOWN = 20  # characters around a difference


@dataclass(frozen=True)
class Certificate:
    """What was checked, and each reason why it does not hold."""

    facts: dict[str, Any]
    problems: tuple[str, ...]
    is_lossless: bool

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def unit(self) -> str:
        """What nats / ln 2 / bytes may be called."""
        return "bits per byte" if self.is_lossless else "bits per byte of the normalized text"

    @property
    def line(self) -> str:
        """The certificate in one line."""
        if self.problems:
            return f"No certificate: {'; '.join(self.problems)}."
        facts = self.facts
        duplicates = "training text not known, so not searched for them"
        if facts["searched"]:
            duplicates = f"none of them among {count_of(facts['searched_documents'], facts['searched'] + ' document')}"
        challenge = f"; Parameter Golf's rule would count {facts['challenge_bytes'] or 0:,} bytes"
        if facts["challenge_bytes"] in (None, facts["scored_bytes"]):
            challenge = ""
        return (
            f"Certificate holds: {count_of(facts['num_documents'], 'document')}, {facts['num_bytes']:,} bytes"
            f" (sha256 {facts['sha256'][:16]}), {duplicates}; decoded exactly; bytes of all tokens add up;"
            f" {facts['coverage']['num_scored']:,} of {facts['num_tokens']:,} tokens scored once{challenge}."
        )

    def write(self, path: Path) -> None:
        """Write certificate.json."""
        said = {"written_by": "hfgolf", "holds": self.holds, "problems": list(self.problems), "unit": self.unit}
        write_text(path, json.dumps(said | self.facts, indent=1) + "\n")


def certify(corpus: Corpus, tokens: TokenCache, plan: Plan, *, searched: Searched | None = "training") -> Certificate:
    """Return the certificate of an evaluation of a corpus' validation tokens with a plan.

    1. SHA-256 and bytes of each validation document and of all. 2. Decoding each document's tokens gives its text.
    3. The bytes of the tokens are the bytes of the text, from the vocabulary and, for a sample, from decoding token by
    token. 4. The plan scores each target once. 5. No validation document is also in the train split (equal text; near
    duplicates are not looked for). 6. A uniform model costs log2(V) x tokens / bytes.

    searched: what the corpus' train split is to the model. None: not known, or not all that it was trained on; 5. is
    left out, then.

    Reads all the text once more. Raises UserError if it cannot be read.
    """
    with tempfile.TemporaryDirectory(dir=cache_folder(corpus.data), prefix="certificate-") as folder:
        pieces = corpus.write_pieces(Path(folder))
        training = pieces["train"] if searched else None
        return certify_text(pieces["val"], training, tokens.val, tokens.tokenizer, plan, searched)


def certify_text(
    validation: Dataset,
    training: Dataset | None,
    stream: Stream,
    tokenizer: PreTrainedTokenizerFast,
    plan: Plan,
    searched: Searched | None = None,
) -> Certificate:
    """Return the certificate for pieces of text (see Corpus.write_pieces). training: those of `searched`, or None."""
    text = _Text(stream, tokenizer)
    for document in documents(validation):
        text.add(document)
    problems = [*text.finish(), *_coverage_problems(plan, stream, document_start(tokenizer))]
    facts: dict[str, Any] = {
        "num_tokens": len(stream.tokens),
        "vocab_size": embedding_rows(tokenizer),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "coverage": plan.coverage(),
        "num_documents": len(text.hashes),
        "num_bytes": text.num_bytes,
        "sha256": text.whole.hexdigest(),
        "documents": [[digest.hex(), num_bytes] for digest, num_bytes in text.hashes],
        "documents_decoded_differently": text.num_different,
        "first_difference": text.difference,
        "decoded_bytes": text.decoded_bytes,
    }
    if plan.num_tokens == len(stream.tokens):
        counted = challenge_bytes(stream.tokens, tokenizer)
        facts["challenge_bytes"] = None if counted is None else _scored_bytes(counted, plan)
    if not problems:  # the bytes of a tokenizer that rewrites its text cannot add up
        problems += _byte_problems(stream, tokenizer, plan, text, facts)
    facts |= {"searched": searched, "searched_documents": None, "duplicates": None}
    if training is not None:
        problems += _duplicate_problems(training, text, facts)
    return Certificate(facts, tuple(problems), text.num_different == 0)


def documents(pieces: Dataset) -> Iterator[list[str]]:
    """Yield the pieces of each document, in order."""
    document: list[str] = []
    for batch in pieces.iter(batch_size=ROWS_PER_BATCH):
        for text, is_start in zip(batch["text"], batch["is_start"], strict=True):
            if is_start and document:
                yield document
                document = []
            document.append(text)
    yield from [document] if document else []


class _Text:
    """Compare documents with the stream of their tokens, one document after the other."""

    def __init__(self, stream: Stream, tokenizer: PreTrainedTokenizerFast) -> None:
        self.stream, self.start = stream, document_start(tokenizer)
        self.decode = tokenizer.backend_tokenizer.decode_batch
        self.ends = np.cumsum(stream.piece_tokens, dtype=np.int64)
        self.num_pieces = self.num_bytes = self.decoded_bytes = self.num_different = self.num_separators = 0
        self.whole = hashlib.sha256()
        self.hashes: list[tuple[bytes, int]] = []
        self.difference: str | None = None
        self.is_other_text = False

    def ids(self, piece: int) -> np.ndarray:
        """Return the tokens of a piece, with what begins a document."""
        return self.stream.tokens[self.ends[piece] - self.stream.piece_tokens[piece] : self.ends[piece]]

    def add(self, document: list[str]) -> None:
        """Count and hash a document, and compare it with what its tokens decode to."""
        raw = [text.encode() for text in document]
        pieces = range(self.num_pieces, self.num_pieces + len(document))
        self.num_pieces = pieces.stop
        self.hashes.append((hashlib.sha256(b"".join(raw)).digest(), sum(map(len, raw))))
        self.whole.update(b"".join(raw))
        self.num_bytes += self.hashes[-1][1]
        counted = self.stream.piece_bytes[pieces.start : pieces.stop].tolist()
        ids = [self.ids(piece).tolist() for piece in pieces] if counted == [*map(len, raw)] else [[]]
        self.is_other_text |= ids[0][: len(self.start)] != self.start
        if self.is_other_text:
            return
        self.num_separators += 1
        decoded = self.decode([ids[0][len(self.start) :], *ids[1:]], skip_special_tokens=False)
        self.decoded_bytes += sum(len(text.encode()) for text in decoded)
        if decoded != document:
            self.num_different += 1
            if self.difference is None:
                pair = "".join(document), "".join(decoded)
                differing = (place for place, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
                place = next(differing, min(map(len, pair)))
                before, after = (ascii(version[place : place + _SHOWN]) for version in pair)
                number = len(self.hashes) - 1
                self.difference = f"first in document {number}, character {place}: {before} became {after}"

    def finish(self) -> list[str]:
        """Return what is wrong with the tokens as the encoding of the documents."""
        separators = int((self.stream.tokens == self.start[0]).sum())
        if self.is_other_text or self.num_pieces != len(self.ends) or separators != self.num_separators:
            return ["the tokens were made from another text; build the token cache again"]
        if not self.num_different:
            return []
        return [
            f"{self.num_different:,} of {count_of(len(self.hashes), 'document')} decode to another text, so the"
            f" tokenizer rewrites text ({self.difference}); use a lossless tokenizer"
        ]


def _coverage_problems(plan: Plan, stream: Stream, start: list[int]) -> list[str]:
    """Return what is wrong with the windows: each target once, but what the plan says it leaves out."""
    targets = plan.targets()
    if plan.num_tokens != len(stream.tokens):
        return [f"only the first {plan.num_tokens:,} of {len(stream.tokens):,} tokens were evaluated"]
    if (np.diff(targets) <= 0).any() or targets[0] < 1 or targets[-1] >= plan.num_tokens:
        return ["the windows do not score each token once, in order"]
    is_missing = np.ones(plan.num_tokens, bool)
    is_missing[targets] = is_missing[0] = False
    if plan.tail == "dropped":
        is_missing[targets[-1] + 1 :] = False
    if plan.separators == "skipped":
        is_missing &= ~np.isin(stream.tokens, start)
    missing = np.flatnonzero(is_missing)
    return [f"{len(missing):,} tokens are not scored, first token {missing[0]}"] if len(missing) else []


def _byte_problems(
    stream: Stream, tokenizer: PreTrainedTokenizerFast, plan: Plan, text: _Text, facts: dict[str, Any]
) -> list[str]:
    """Return what is wrong with the bytes per token, and add the sums to the facts."""
    try:
        counts = bytes_per_token(stream, tokenizer)
    except UserError as error:
        return [str(error).rstrip(".")]
    facts["token_bytes"] = int(counts.sum(dtype=np.int64))
    sampled = np.unique(np.linspace(0, len(text.ends) - 1, min(len(text.ends), _SAMPLED_PIECES)).astype(int))
    facts["pieces_decoded_by_token"] = len(sampled)
    for piece in map(int, sampled):
        start = text.ends[piece] - stream.piece_tokens[piece]
        place = _first_miscount(tokenizer, text.ids(piece), counts[start : text.ends[piece]])
        if place is not None:
            return [
                f"decoding token by token gives other bytes than the vocabulary, first at token {start + place} (id"
                f" {stream.tokens[start + place]}); use another tokenizer"
            ]
    facts["scored_bytes"] = num_bytes = _scored_bytes(counts, plan)
    nats_per_token = math.log(embedding_rows(tokenizer))
    nats = score(lambda _, labels: as_fp64((labels != IGNORED).sum()) * nats_per_token, stream.read, plan, 64)
    found, expected = nats / math.log(2) / num_bytes, math.log2(embedding_rows(tokenizer)) * plan.num_scored / num_bytes
    facts["uniform_bits_per_byte"] = found
    if not math.isclose(found, expected, rel_tol=1e-9):
        return [f"a uniform model costs {found} bits per byte instead of {expected}"]
    return []


def _scored_bytes(counts: np.ndarray, plan: Plan) -> int:
    """Return the bytes of the targets that a plan scores."""
    total = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return int((total[plan.windows[:, 2] + 1] - total[plan.windows[:, 1]]).sum())


def _duplicate_problems(training: Dataset, text: _Text, facts: dict[str, Any]) -> list[str]:
    """Return which validation documents are in the text that is searched, too."""
    places = {digest: number for number, (digest, _) in reversed([*enumerate(text.hashes)])}
    found, num_documents = set(), 0
    for document in documents(training):
        num_documents += 1
        digest = hashlib.sha256("".join(document).encode()).digest()
        if digest in places:
            found.add(places[digest])
    facts |= {"searched_documents": num_documents, "duplicates": sorted(found)}
    if not found:
        return []
    first, kind = min(found), facts["searched"]
    return [
        f"{len(found):,} of {len(text.hashes):,} validation documents are also {kind} documents (the first is document"
        f" {first}, {text.hashes[first][1]:,} bytes, sha256 {text.hashes[first][0].hex()[:16]}); remove them from the"
        f" {kind} text"
    ]


def _first_miscount(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray, counts: np.ndarray) -> int | None:
    """Return the place of the first token at which the bytes decoded so far are not the sum of the counts, or None.

    A character in several tokens is decoded with the last of them, so only whole characters are compared.
    """
    backend = tokenizer.backend_tokenizer
    decoding = DecodeStream(skip_special_tokens=False)
    start = document_start(tokenizer)
    first = len(start) * int(ids[0] == start[0])
    expected = num_bytes = 0
    for place in range(first, len(ids)):
        expected += int(counts[place])
        text = decoding.step(backend, int(ids[place]))
        if text is None:
            continue
        num_bytes += len(text.encode())
        if num_bytes != expected:
            return place
    whole = len(backend.decode(ids[first:].tolist(), skip_special_tokens=False).encode())
    return None if whole == expected else len(ids) - 1
