"""Sources, splits and pieces, compared with the text itself, and one clear line for each mistake."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import hashlib
import http.server
import json
import lzma
import random
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import zstandard

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data import corpus as corpus_module
from hfgolf.data import documents as documents_module
from hfgolf.data.corpus import load_corpus
from hfgolf.data.pieces import PIECE_CHARACTERS, PieceWriter
from hfgolf.data.token_cache import load_tokens
from hfgolf.system.errors import UserError

Documents = dict[str, list[str]]
ROOT = Path(__file__).parents[2]
CODECS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def read(data: DataSection, folder: Path) -> Documents:
    """Reassemble the documents of each split from their pieces."""
    documents: Documents = {}
    for split, pieces in load_corpus(data).write_pieces(folder / "pieces").items():
        documents[split] = []
        for row in pieces:
            assert 0 < len(row["text"]) <= PIECE_CHARACTERS
            if row["is_start"]:
                documents[split].append("")
            documents[split][-1] += row["text"]
    return documents


def fails(data: DataSection, folder: Path) -> str:
    """Return the one-line error for `data`."""
    with pytest.raises(UserError) as caught:
        load_corpus(data).write_pieces(folder / "pieces")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ending", CODECS)
def test_text_files_are_read_byte_for_byte(tmp_path, write, files_config, ending, awkward):
    for name in ("a.txt", "b.md", "c.log"):
        write(name + ending, CODECS[ending]((name + awkward).encode()))
    val = write("deep/val.txt" + ending, CODECS[ending](awkward.encode()))
    documents = read(files_config(f"{tmp_path}/text/**/*", val_files=[val]), tmp_path)
    # val.txt matches data.files too: it must not be trained on
    assert documents == {"train": [name + awkward for name in ("a.txt", "b.md", "c.log")], "val": [awkward]}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_glob_skips_empty_files(tmp_path, write, files_config):
    write("a.txt", "some text")
    write("b.txt", "")
    documents = read(files_config(f"{tmp_path}/text/*", split="contiguous", val_fraction=0.3), tmp_path)
    assert documents == {"train": ["some t"], "val": ["ext"]}
    (tmp_path / "text" / "a.txt").unlink()
    assert "b.txt is empty" in fails(files_config(f"{tmp_path}/text/*"), tmp_path)


def test_url_is_downloaded_once(tmp_path, write, files_config, awkward):
    write("a.txt.gz", gzip.compress(awkward.encode()))
    write("rows.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    val = write("val.txt", "validation")
    write("naïve 你 50%.txt", "letters")
    with serving(tmp_path / "text") as address:
        for spelled in ("naïve 你 50%25.txt", "na%C3%AFve%20%E4%BD%A0%2050%25.txt"):
            assert read(files_config(f"{address}/{spelled}", val_files=[val]), tmp_path)["train"] == ["letters"]
        data = files_config(f"{address}/a.txt.gz", val_files=[val])
        assert read(data, tmp_path) == {"train": [awkward], "val": ["validation"]}
        table = f"{address}/rows.jsonl.gz?download=1"  # the ending is that of the path
        assert read(files_config(table, val_files=[val]), tmp_path)["train"] == ["one", "two"]
        assert f"{address}/nothing.txt" in fails(files_config(f"{address}/nothing.txt", val_files=[val]), tmp_path)
    assert read(data, tmp_path)["train"] == [awkward]  # from the copy: the server is gone


def test_web_page_is_no_file_unless_its_name_says_so(tmp_path, write, files_config, monkeypatch):
    val = write("val.txt", "validation")
    for name in ("input.txt", "page.html"):
        write(name, "<!DOCTYPE html><p>text</p>")
    monkeypatch.setitem(http.server.SimpleHTTPRequestHandler.extensions_map, ".txt", "text/html; charset=utf-8")
    with serving(tmp_path / "text") as address:
        url = f"{address}/input.txt"
        assert f"{url} is a web page, not a file; give the address of" in fails(files_config(url), tmp_path)
        page = files_config(f"{address}/page.html", val_files=[val])
        assert read(page, tmp_path)["train"] == ["<!DOCTYPE html><p>text</p>"]
    assert not [*(tmp_path / "cache" / "downloads").rglob("*input.txt")]


class ShortAnswer(http.server.BaseHTTPRequestHandler):
    """Promise 1,000 bytes, and send the first 400."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 400)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_truncated_download_is_discarded(tmp_path, write, files_config):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ShortAnswer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.txt"
        folder = tmp_path / "cache" / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:16]
        folder.mkdir(parents=True)
        (folder / "a.txt.123.part").write_text("of a process that was killed")
        message = fails(files_config(url, val_files=[write("val.txt", "v")]), tmp_path)
        server.shutdown()
    assert "ended 600 bytes before the end" in message and url in message
    assert [path.name for path in folder.iterdir()] == ["download.lock"]


def test_zst_is_read_whole_or_rejected(tmp_path, write, files_config):
    texts = [f"{number}: {hashlib.sha256(bytes([number])).hexdigest()}" for number in range(200)]
    first, second = "".join(texts[:100]).encode(), "".join(texts[100:]).encode()
    val = write("val.txt", "validation")
    frames = zstandard.compress(first) + zstandard.compress(second)
    assert read(files_config(write("a.txt.zst", frames), val_files=[val]), tmp_path)["train"] == ["".join(texts)]
    whole = zstandard.compress(first + second)
    message = fails(files_config(write("cut.txt.zst", whole[: len(whole) // 2]), val_files=[val]), tmp_path)
    assert "cut.txt.zst" in message and "Truncated" in message


def test_file_changed_while_read_is_rejected(tmp_path, write, files_config):
    corpus = load_corpus(files_config(write("a.txt", "one"), val_files=[write("val.txt", "v")]))
    time.sleep(0.02)  # longer than the resolution of the file system's clock
    write("a.txt", "two")  # after hashing
    with pytest.raises(UserError, match=r"a\.txt changed while it was being read"):
        corpus.write_pieces(tmp_path / "pieces")


@pytest.mark.parametrize(("name", "is_read"), [("a.txt", False), ("a.txt", True), ("a.zip", False)])
def test_file_that_is_gone_is_named_instead_of_the_cache(tmp_path, write, files_config, monkeypatch, name, is_read):
    with zipfile.ZipFile(write("a.zip", b""), "w") as archive:
        archive.writestr("in.txt", "zipped")
    write("a.txt", "text")
    path = tmp_path / "text" / name
    data = files_config(str(path), val_files=[write("val.txt", "v")])
    corpus = load_corpus(data)
    if is_read:
        monkeypatch.setattr(corpus_module, "read_file", lambda *_: path.unlink(missing_ok=True) or [("a", None, ["a"])])
    else:
        path.unlink()
    with pytest.raises(UserError, match=f"^{path} (cannot be read|changed while it was being read)"):
        load_tokens(data, TokenizerSection(kind="byte"), corpus)


def test_streamed_and_downloaded_datasets_have_the_same_documents(tmp_path, write, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "copies")
    write("data.jsonl", "".join(json.dumps({"text": f"document {row}"}) + "\n" for row in range(40)))
    for settings in ({}, {"max_documents": 20}, {"split": "contiguous"}):
        hub = {"source": "hub", "hub_name": str(tmp_path / "text"), "val_fraction": 0.3, **settings}  # a folder here
        both = [DataSection(streaming=streaming, **hub) for streaming in (True, False)]
        streamed = read(both[0], tmp_path)
        assert settings or not list((tmp_path / "copies").rglob("*.arrow"))
        assert streamed == read(both[1], tmp_path) and list((tmp_path / "copies").rglob("*.arrow"))
        assert load_corpus(both[0]).identity == load_corpus(both[1]).identity
        if "split" not in settings:
            expected = sorted(f"document {row}" for row in range(settings.get("max_documents", 40)))
            assert streamed["val"] and sorted(streamed["train"] + streamed["val"]) == expected


@pytest.mark.parametrize("is_streamed", [True, False])
def test_other_columns_of_a_dataset_are_not_decoded(tmp_path, monkeypatch, is_streamed):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "copies")
    pictures = {"text": datasets.Value("string"), "picture": datasets.Image()}
    rows = {"text": ["a caption", "another"], "picture": [{"bytes": b"damaged", "path": None}] * 2}
    (tmp_path / "text").mkdir()
    datasets.Dataset.from_dict(rows, datasets.Features(pictures)).to_parquet(tmp_path / "text" / "a.parquet")
    data = DataSection(source="hub", hub_name=str(tmp_path / "text"), streaming=is_streamed, split="contiguous")
    assert read(data, tmp_path)["train"][0] == "a caption"


def test_interrupted_stream_is_one_line_and_leaves_no_files(tmp_path, monkeypatch):
    def rows() -> Iterator[dict[str, str]]:
        yield from ({"text": f"document {row}"} for row in range(1500))
        raise ConnectionError("the server hung up\nwithout a word")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **options: stream if options["streaming"] else None)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: SimpleNamespace(hash="abc"))
    data = DataSection(source="hub", hub_name="somebody/texts", streaming=True, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        load_tokens(data, TokenizerSection(kind="byte"))
    message = str(caught.value)
    assert "\n" not in message and "somebody/texts" in message and "the server hung up" in message
    assert "row 1000" in message and "network" in message
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.parent for path in left] == [tmp_path / "cache" / "locks"]


def test_hash_split_of_a_document_does_not_depend_on_the_others(tmp_path, write, files_config):
    for number in range(60):
        write(f"{number}.txt", f"document {number}")
    config = functools.partial(files_config, f"{tmp_path}/text/*", val_fraction=0.3)
    documents = read(config(), tmp_path)
    assert not set(documents["train"]) & set(documents["val"])
    assert len(documents["train"]) + len(documents["val"]) == 60
    assert 6 < len(documents["val"]) < 30  # binomial(60, 0.3): 18, and 3.5 standard deviations on either side
    for number in range(60, 70):
        write(f"{number}.txt", f"document {number}")
    grown = read(config(), tmp_path)
    assert set(documents["train"]) <= set(grown["train"]) and set(documents["val"]) <= set(grown["val"])


def test_contiguous_split_holds_out_the_last_characters(tmp_path, write, files_config):
    text = "".join(f"{number} 你好\r\n" for number in range(9000))
    path = write("a.txt", text)
    cut = int(len(text) * 0.9)
    documents = read(files_config(path, split="contiguous", val_fraction=0.1), tmp_path)
    assert documents == {"train": [text[:cut]], "val": [text[cut:]]}
    paths = [write("a.txt", "a" * 50), write("b.txt", "b" * 50)]
    documents = read(files_config(*paths, split="contiguous", val_fraction=0.25), tmp_path)
    assert documents == {"train": ["a" * 50, "b" * 25], "val": ["b" * 25]}


@pytest.mark.parametrize("characters", ["a\n", "a ", "a \n", " \n", "é\u00a0 \n\u2028\x1c\r\t", "a" * 9000 + " \n"])
def test_a_piece_ends_at_the_last_newline_or_else_space_alone_in_its_second_half(tmp_path, characters):
    text = "".join(random.Random(0).choices(characters, k=40_000))

    def is_alone(position: int, character: str) -> bool:
        before, after = text[position - 1], text[position + 1]
        return text[position] == character and not before.isspace() and not after.isspace()

    def expected_end(start: int) -> int:
        end = start + PIECE_CHARACTERS
        half = range(end - 1, start + PIECE_CHARACTERS // 2 - 1, -1)
        newlines = (position + 1 for position in half if is_alone(position, "\n"))
        spaces = (position for position in half if is_alone(position, " "))
        return next(newlines, next(spaces, end))

    with PieceWriter(tmp_path / "text.arrow") as writer:
        writer.add_document([text])
    start = 0
    for piece in datasets.Dataset.from_file(str(tmp_path / "text.arrow"))["text"][:]:
        is_last = len(text) - start <= PIECE_CHARACTERS
        assert start + len(piece) == (len(text) if is_last else expected_end(start))
        start += len(piece)
    assert start == len(text)


def test_pieces_do_not_depend_on_read_chunks(tmp_path, write, files_config, monkeypatch):
    path = write("a.txt", ("long " * 3000 + "\n" + "x" * 20000 + "\n" + "line\n" * 5000) * 2)
    data = files_config(path, val_files=[write("val.txt", "v")])
    whole = load_corpus(data).write_pieces(tmp_path / "whole")["train"]["text"][:]
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 1013)
    assert load_corpus(data).write_pieces(tmp_path / "blocks")["train"]["text"][:] == whole


def test_python_stdlib_is_real_text_and_split_by_file(tmp_path):
    corpus = load_corpus(DataSection(cache_dir=str(tmp_path)))
    names = [name for name, _, _ in corpus.identity["files"]]
    assert names == sorted(names) and "ast.py" in names and not any("site-packages" in name for name in names)
    assert sum(size for _, size, _ in corpus.identity["files"]) > 10e6
    largest = max(size for _, size, _ in corpus.identity["files"])
    assert largest < 0.03 * sum(size for _, size, _ in corpus.identity["files"])  # no file alone decides the loss
    splits = [corpus.hashed_split(name) for name in names]
    assert 0.02 < splits.count("val") / len(names) < 0.09
    assert load_corpus(DataSection(cache_dir=str(tmp_path))).identity == corpus.identity


def test_identity_covers_everything_the_documents_depend_on(write, files_config):
    path = write("a.txt", "one")
    before = load_corpus(files_config(path)).identity
    assert json.loads(json.dumps(before)) == before
    assert load_corpus(files_config(path, val_fraction=0.5)).identity != before
    assert load_corpus(files_config(path, num_workers=3, in_memory=True)).identity == before
    write("a.txt", "two")
    assert load_corpus(files_config(path)).identity != before


def test_bad_input_is_one_clear_line(tmp_path, write, files_config, monkeypatch):
    assert "nothing*.txt" in fails(files_config(f"{tmp_path}/nothing*.txt"), tmp_path)
    assert "empty.txt" in fails(files_config(write("empty.txt", "")), tmp_path)
    assert "empty.txt.gz" in fails(files_config(write("empty.txt.gz", gzip.compress(b""))), tmp_path)
    assert "broken.txt.gz" in fails(files_config(write("broken.txt.gz", gzip.compress(b"text" * 99)[:-9])), tmp_path)
    message = fails(files_config(write("one.jsonl", '{"text": "a"}\n')), tmp_path)
    assert "split" in message and "data.val_fraction" in message and "data.val_files" in message
    path = write("a.txt", "text")
    assert "data.cache_dir: cannot create" in fails(files_config(path, cache_dir=path + "/below"), tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(corpus_module, "file_hashes", refuse)
    assert f"cannot read {path} (Permission denied)" in fails(files_config(path), tmp_path)


@pytest.mark.parametrize(
    ("train", "val", "options", "reason"),
    [
        ("a.jsonl", "a.jsonl", {}, "The train split .* empty: every file in data.files is also in data.val_files"),
        ("empty*.jsonl", "a.jsonl", {}, r"The train split .* empty: no document has text in .*; .* in data\.files"),
        ("a.jsonl", "empty*.jsonl", {}, r"The validation split .* no document has text in .*; .* data\.val_files"),
        ("a.jsonl", "b.jsonl", {"max_documents": 1}, "The validation split .* or data.max_documents 1 ends before one"),
    ],
)
def test_empty_split_names_the_cause_that_was_checked(write, files_config, tmp_path, train, val, options, reason):
    for name, text in (("a", "one"), ("b", "two"), ("empty", "")):
        write(f"{name}.jsonl", f'{{"text": "{text}"}}\n')
    data = files_config(str(tmp_path / "text" / train), val_files=[str(tmp_path / "text" / val)], **options)
    with pytest.raises(UserError, match=reason):
        load_corpus(data).write_pieces(tmp_path / "pieces")


def test_unreachable_hub_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    data = DataSection(source="hub", hub_name="nobody/nothing", cache_dir=str(tmp_path))
    assert "nobody/nothing" in fails(data, tmp_path)


def test_start_of_the_training_text_and_its_bytes(tmp_path, write, files_config):
    text = "é" * 5_000 + "a" * 90_000
    one = files_config(write("one.txt", text), val_fraction=0.1)
    for max_bytes in (10**6, 1_000):
        assert load_corpus(one).train_start(max_bytes, tmp_path) == ([text[:85_000]], 90_000)
    held_out = files_config(write("one.txt", text), val_files=[write("val.txt", "held out")])
    assert load_corpus(held_out).train_start(10**6, tmp_path) == ([text], 100_000)
    names = [f"part{number}.txt" for number in range(40)]
    parts = {name: name * 100 for name in names}
    paths = [str(write(f"many/{name}", parts[name])) for name in names]
    data = files_config(*paths, val_fraction=0.2, split="documents")
    train = read(data, tmp_path)["train"]
    long = files_config(write("long.txt", "a" * 5_000_000), val_fraction=0.5)
    start, num_bytes = load_corpus(long).train_start(10**6, tmp_path)
    assert num_bytes == 2_500_000 and 10**6 < len("".join(start)) < 1.2 * 10**6
    start, num_bytes = load_corpus(data).train_start(10**6, tmp_path)
    assert start == train and 0 < num_bytes == sum(map(len, train)) < sum(map(len, parts.values()))
    held = [load_corpus(data).hashed_split(file.name) for file in load_corpus(data).files].index("val")
    first_is_val = load_corpus(files_config(*paths[held:], val_fraction=0.2, split="documents"))
    assert [first_is_val.hashed_split(file.name) for file in first_is_val.files][:1] == ["val"]
    assert first_is_val.train_start(1, tmp_path)[0], "it tells what the text is like"
    for character in ("a", "€"):  # all of it validates
        with pytest.raises(UserError, match=r"The train split .* is empty"):
            load_corpus(files_config(write("short.txt", character))).train_start(10**6, tmp_path)
