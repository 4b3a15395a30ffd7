"""A corpus: its sources and its split into train and validation.

Which files there are is in `files`, what a file holds in `documents`. Does not know tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa

from hfgolf.config.mixture import of_text, stages
from hfgolf.config.sections import DataSection
from hfgolf.data.cache_folder import cache_folder, file_hashes, file_state
from hfgolf.data.documents import Document, Notes, content_column, hub_revision, newer_kinds, read_file, read_hub
from hfgolf.data.exports import READS
from hfgolf.data.files import ARCHIVES, KNOWN, SourceFile, log_once, match_files, named_files, stdlib_files, with_splits
from hfgolf.data.pieces import PIECE_CHARACTERS, ROWS_PER_BATCH, PieceWriter, RowWriter
from hfgolf.data.tables import TABLES
from hfgolf.system.errors import UserError
from hfgolf.system.wording import count_of, join_words, one_line

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

SPLITS = ("train", "val")
_Writer = TypeVar("_Writer", bound=RowWriter)


@dataclass(frozen=True)
class Corpus:
    """Text that has been identified but not read yet.

    identity: a JSON-serializable dict that changes whenever the documents or their split change.
    """

    identity: dict[str, Any]
    data: DataSection
    files: tuple[SourceFile, ...] = ()
    bytes_files: tuple[SourceFile, ...] = ()
    """With shards: the files with the bytes of each validation token."""
    states: tuple[list[int], ...] = ()
    """`file_state` of each of `files` when it was hashed."""
    texts: dict[str, Corpus] = field(default_factory=dict)
    """Of a mixture: the corpus of each text, by its name."""

    @property
    def reading(self) -> dict[str, Any]:
        """What a token cache depends on beyond the identity: how hfgolf reads what is there.

        It is no part of the identity, so that a run goes on if another version of hfgolf reads the same from its text.
        """
        reading: dict[str, Any] = {}
        if before := content_column(self.data).before:
            reading["before_answer"] = before
        if any(file.endings[0] == ".tar" for file in self.files):
            reading["tar_kinds_sha256"] = hashlib.sha256(" ".join(KNOWN).encode()).hexdigest()
            reading["tar_pairs"] = "KEY.*txt"
        if any(file.endings[0] in (".json", *ARCHIVES) for file in self.files):
            reading["exports"] = READS
        if any(file.endings[0] in ARCHIVES for file in self.files):
            reading["archive_splits"] = "train"
        if optional := " ".join(file.name for file in self.files if file.is_optional):  # others must have the column
            reading["optional_files_sha256"] = hashlib.sha256(optional.encode(errors="surrogateescape")).hexdigest()
        return reading

    def write_pieces(self, folder: Path) -> dict[str, Dataset]:
        """Write the documents to `folder` and return {"train": Dataset, "val": Dataset}, memory-mapped.

        Each row is a piece of a document, at most PIECE_CHARACTERS long, in order: {"text": str, "is_start": bool}.
        `is_start` marks the first piece of a document, or of a document's part in a split. Memory use is bounded for
        any corpus.

        Raises UserError if text cannot be read or a split is empty.
        """
        if self.data.source == "shards" or self.data.ids_column is not None:
            key = "source shards" if self.data.source == "shards" else f"ids_column {self.data.ids_column}"
            raise UserError(f"data.{key} holds tokens, not text: what needs the text itself cannot use it.")
        is_cut = self.data.split == "contiguous" and not self.data.val_files
        is_chat = self.data.messages_column is not None
        fill = partial(_add_messages, self.write_rows(folder / "rows")) if is_chat else self._add_pieces
        pieces = self._write(folder, PieceWriter, self._cut_pieces if is_cut else fill)
        if not is_cut and not is_chat and self._is_undivided(pieces):
            del pieces  # it maps the files that are written again
            pieces = self._write(folder, PieceWriter, self._cut_pieces)
        for split in SPLITS:
            self.require_text(split, len(pieces[split]))
        return pieces

    def write_rows(self, folder: Path) -> dict[str, Dataset]:
        """Write the rows of data.ids_column or data.messages_column to `folder`, and return them like write_pieces.

        Each row is {"name": str, "content": token ids, or messages as JSON}. A split may be empty.
        """
        is_chat = self.data.messages_column is not None
        content = pa.string() if is_chat else pa.list_(pa.uint32())
        schema = pa.schema({"name": pa.string(), "content": content})

        def fill(train: RowWriter, val: RowWriter) -> None:
            for name, split, value in self._documents(folder):
                shown = name.encode(errors="backslashreplace").decode()  # a file's name need not be UTF-8
                (val if split == "val" else train).append(shown, json.dumps(value) if is_chat else value)

        rows = self._write(folder, partial(RowWriter, schema=schema), fill)
        whole = max(rows.values(), key=len)
        if len(whole) > 1 and self._is_undivided(rows):
            num_train = min(len(whole) - 1, int(len(whole) * (1 - self.data.val_fraction)))
            return {"train": whole.select(range(num_train)), "val": whole.select(range(num_train, len(whole)))}
        return rows

    def _is_undivided(self, pieces: Mapping[str, Dataset]) -> bool:
        """Return whether there are too few documents for their names to divide, and say so."""
        is_undivided = not self.data.val_files and {len(split) > 0 for split in pieces.values()} == {True, False}
        if is_undivided:
            logger.info("data: too few documents to divide by their names, so the end of the text validates")
        return is_undivided

    def _write(
        self, folder: Path, build: Callable[[Path], _Writer], fill: Callable[[_Writer, _Writer], None]
    ) -> dict[str, Dataset]:
        """Return what `fill` writes to the writers of both splits, memory-mapped."""
        from datasets import Dataset

        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{split}.arrow" for split in SPLITS]
        with build(paths[0]) as train, build(paths[1]) as val:
            fill(train, val)
        for file, state in zip(self.files, self.states, strict=True):
            try:
                is_unchanged = file_state(file.path) == state
            except OSError:  # it is gone
                is_unchanged = False
            if not is_unchanged:
                raise UserError(f"{file.path} changed while it was being read; start again when nothing writes to it.")
        return {split: cast(Dataset, Dataset.from_file(str(path))) for split, path in zip(SPLITS, paths, strict=True)}

    def _add_pieces(self, train: PieceWriter, val: PieceWriter) -> None:
        for _, split, blocks in self._documents(train.path.parent):
            (val if split == "val" else train).add_document(blocks)

    def _cut_pieces(self, train: PieceWriter, val: PieceWriter) -> None:
        # Two passes, even over the network for a streamed dataset: where to cut depends on the total length.
        scratch = train.path.parent
        num_characters = sum(len(block) for _, _, blocks in self._documents(scratch) for block in blocks)
        num_left = int(num_characters * (1 - self.data.val_fraction))  # characters still to go to train
        for _, _, blocks in self._documents(scratch):
            for block in blocks:
                train.add(block[:num_left])
                val.add(block[num_left:])
                num_left = max(0, num_left - len(block))
            train.end_document()
            val.end_document()

    def train_start(self, max_bytes: int, scratch: Path) -> tuple[list[str], float]:
        """Return the training text among the first max_bytes of the text, in blocks, and the bytes of all of it.

        Of a larger text, the bytes follow from the sizes of its files, so they are too few if these are compressed;
        those of a dataset of the Hub are infinity. scratch: a folder for files that must be unpacked first. Raises
        UserError if text cannot be read or there is none.
        """
        splits: dict[str, list[str]] = {split: [] for split in SPLITS}
        has_val_files, num_bytes, is_whole = bool(self.data.val_files), 0, True
        is_cut = self.data.split == "contiguous" and not has_val_files
        documents = (document for document in self._documents(scratch) if document[1] != "val" or not has_val_files)
        for split, block in ((split, block) for _, split, content in documents for block in content if block):
            splits["train" if is_cut or split != "val" else "val"].append(block)
            num_bytes += len(block.encode())
            if num_bytes > max_bytes:
                is_whole = False
                break
        is_cut |= not has_val_files and not all(splits.values())  # as write_pieces does it
        blocks = splits["train"] + (splits["val"] if is_cut else [])
        self.require_text("train", len(blocks))
        if is_whole and not is_cut:
            return blocks, sum(len(block.encode()) for block in blocks)
        if not is_whole and (not self.files or self.data.max_documents is not None):
            return blocks, math.inf
        on_disk = 0 if is_whole else sum(file.path.stat().st_size for file in self.files if file.split != "val")
        whole = left = int((1.0 if has_val_files else 1 - self.data.val_fraction) * max(num_bytes, on_disk))
        kept = []
        for block in blocks:
            kept.append(block.encode()[:left])
            left -= len(kept[-1])
        blocks = [text for block in kept if (text := block.decode(errors="ignore"))]
        self.require_text("train", len(blocks))
        return blocks, whole

    def hashed_split(self, name: str) -> str:
        """Return the split of a document, which depends on its name alone."""
        if self.data.val_files:
            return "train"
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()  # a file's name need not be UTF-8
        return "val" if int.from_bytes(digest[:8]) < self.data.val_fraction * 2**64 else "train"

    def _documents(self, scratch: Path) -> Iterator[Document]:
        """Yield the documents in order, with their splits. scratch: a folder for files that must be unpacked first."""
        notes, column = Notes(), content_column(self.data)
        if self.data.source == "hub":
            documents = read_hub(self.data, notes)
        else:
            read = (read_file(file, self.data, scratch, notes) for file in self.files)
            documents = itertools.chain.from_iterable(read)
        for name, split, content in itertools.islice(documents, self.data.max_documents):
            yield name, split or self.hashed_split(name), content
        if notes.skipped:
            found = f"{count_of(len(notes.skipped), 'file')} without a column {column.name!r}"
            log_once(f"data.files: skipped {found}: {join_words(notes.skipped, maximum=3)}")
        if notes.empty:
            found = f"{count_of(len(notes.empty), 'file')} without a document"
            log_once(f"data.files: skipped {found}: {join_words(notes.empty, maximum=3)}")
        if notes.plain_json:
            found = f"{count_of(len(notes.plain_json), 'file')} of JSON as plain text"
            reason = "because only .jsonl, .ndjson and .json are read as rows"
            log_once(f"data.files: read {found}, {reason}: {join_words(notes.plain_json, maximum=3)}")
        if notes.unread:
            unread = one_line(join_words(notes.unread, maximum=8))
            log_once(f"data.{column.key} {column.name}: of the other columns, these are not read: {unread}")
        if names := [name for name, (num_empty, _) in notes.rows.items() if num_empty]:
            num_empty, num_rows = map(sum, zip(*(notes.rows[name] for name in names), strict=True))
            found = f"{num_empty:,} of {count_of(num_rows, 'row')}, in which it is missing or has nothing to read"
            log_once(f"data.{column.key} {column.name}: skipped {found}: {join_words(names, maximum=3)}")

    def require_text(self, split: str, num_found: int) -> None:
        """Raise UserError if nothing was found in a split."""
        if num_found:
            return
        where, name = f"data.source {self.data.source}", {"val": "validation"}.get(split, split)
        column = content_column(self.data)
        content = {"text_column": "text", "ids_column": "token ids"}.get(column.key, "a turn of the assistant to learn")
        found = f"{content} in data.{column.key} {column.name}"
        reason = f"no document has {found}" if self.data.val_files else f"too few documents have {found}"
        if self.data.val_files and split == "train" and not any(file.split is None for file in self.files):
            reason = "every file in data.files is also in data.val_files"
        elif self.data.max_documents is not None:
            reason += f", or data.max_documents {self.data.max_documents} ends before one"
        remedy = f"name other files in data.{'files' if split == 'train' else 'val_files'}"
        if not self.data.val_files:
            remedy = f"add text, change data.val_fraction ({self.data.val_fraction}) or name data.val_files"
        raise UserError(f"The {name} split of {where} is empty: {reason}; {remedy}.")


def _add_messages(rows: Mapping[str, Dataset], train: PieceWriter, val: PieceWriter) -> None:
    """Write the text of conversations, as `Corpus.write_rows` divides them."""
    for split, writer in zip(SPLITS, (train, val), strict=True):
        for batch in rows[split].iter(batch_size=ROWS_PER_BATCH):
            for content in batch["content"]:
                writer.add_document(message["content"] for message in json.loads(content))


def text_name(data: DataSection) -> str:
    """Return a few words for a person: which text this is."""
    if data.source == "hub":
        return str(data.hub_name)
    if data.mixture:
        return join_words(data.sources(), maximum=3)
    return "Python's standard library" if data.source == "python_stdlib" else join_words(data.files, maximum=3)


def load_corpus(data: DataSection) -> Corpus:
    """Identify the text that `data` names. Reads files only to hash them, and only if they changed (see file_hashes).

    Raises UserError if nothing matches, a file is empty, or a Hub dataset cannot be reached.
    """
    if data.mixture:
        return _load_mixture(data)
    is_local, data = data.source in ("files", "shards"), with_splits(data)
    files = stdlib_files() if data.source == "python_stdlib" else named_files(data) if is_local else []
    if not data.val_files:  # named_files finds those that are called so
        data = data.replace(val_files=[str(file.path) for file in files if file.split == "val"])
    if _is_all_in_one_split(data, files):
        data = data.replace(split="contiguous")
    identity: dict[str, Any] = {
        "source": data.source,
        "split": "files" if data.val_files else data.split,
        "val_fraction": None if data.val_files else data.val_fraction,
        "max_documents": data.max_documents,
        "piece_characters": PIECE_CHARACTERS,
    }
    for key in ("ids_column", "messages_column"):
        if getattr(data, key) is not None:
            identity[key] = getattr(data, key)
    if data.source == "hub":
        hub = {key: getattr(data, key) for key in ("hub_name", "hub_config", "hub_split", "text_column")}
        return Corpus({**identity, **hub, "hub_revision": hub_revision(data)}, data)
    bytes_files = match_files(data, "val_bytes_files", "bytes")
    kinds = {file.endings[0] for file in files}
    if kinds & {*TABLES, *ARCHIVES}:
        identity["text_column"] = data.text_column
    if newer := set[str]().union(*(newer_kinds(file) for file in files if file.endings[0] == ".zip")):
        identity["member_kinds"] = sorted(newer)  # older caches lack them
    if ".ipynb" in kinds:
        identity["notebooks"] = "cells"  # older caches have their JSON
    if data.encoding is not None:
        identity["encoding"] = data.encoding
    if kinds & {".csv", ".tsv"}:
        identity["csv_cells"] = "as written"  # older caches lack the texts that pandas takes for missing cells
    try:
        states = {file.path: file_state(file.path) for file in [*files, *bytes_files]}
        hashes = file_hashes(states, cache_folder(data) / "hashes.json")
    except OSError as error:
        raise UserError(f"data.files: cannot read {error.filename} ({error.strerror}); make it readable.") from error

    def listed(some: Iterable[SourceFile]) -> list[list[Any]]:
        return [[file.name, states[file.path][0], hashes[file.path]] for file in some]

    identity["files"] = listed(file for file in files if file.split is None)
    identity["val_files"] = listed(file for file in files if file.split == "val")
    if data.source == "shards":
        trained = {hashes[file.path]: file.name for file in files if file.split is None}
        for file in files:
            if file.split == "val" and (copy := trained.get(hashes[file.path])):
                logger.warning(
                    "data.val_files: %s has the same content as %s, which trains; its loss does not show how good the"
                    " model is on new text",
                    file.name,
                    copy,
                )
        identity["separator_id"] = data.separator_id
        identity["val_bytes"] = listed(bytes_files)
    return Corpus(identity, data, tuple(files), tuple(bytes_files), tuple(states[f.path] for f in files))


def _load_mixture(data: DataSection) -> Corpus:
    texts: dict[str, Corpus] = {}
    for name, section in data.sources().items():
        with of_text(name):
            texts[name] = load_corpus(section)
    shares = ", ".join(f"{':'.join(map(str, turns))} from token {start}" for start, turns in stages(data.mixture))
    identity: dict[str, Any] = {"source": "mixture", "shares": shares}
    for number, text in enumerate(texts.values(), 1):
        identity |= {f"entry {number}: {key}": value for key, value in text.identity.items()}
    if data.messages_column is not None:
        identity["messages_column"] = data.messages_column
    return Corpus(identity, data, texts=texts)


def _is_all_in_one_split(data: DataSection, files: Sequence[SourceFile]) -> bool:
    """Return whether these are text files, one document each, that the hashes of their names do not divide."""
    has_tables = any(file.endings[0] in (*TABLES, *ARCHIVES) for file in files)
    if data.source != "files" or data.val_files or has_tables or data.ids_column or data.messages_column:
        return False
    unread = Corpus({}, data)
    return len({unread.hashed_split(file.name) for file in files[: data.max_documents]}) == 1


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two identities: "field (old -> new)", or "files (a.txt and 2 more)" for lists."""
    changes = []
    for name in {**now, **before}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list) and all(isinstance(entry, list) for entry in [*old, *new]):
            differing = {*map(tuple, old)} ^ {*map(tuple, new)}
            names = dict.fromkeys(entry[0] for entry in [*new, *old] if tuple(entry) in differing)
            changes.append(f"{name} ({join_words(names, maximum=1)})" if names else name)
        elif isinstance(new, dict) or name.endswith("sha256"):
            changes.append(name)  # hashes mean nothing to a reader
        else:
            changes.append(f"{name} ({old} -> {new})")
    return changes
