"""A mixture reads each text in its exact share, as a pure function of seed and position, and says what is wrong."""

from __future__ import annotations

import functools
import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from test_batches import Stream

from hfgolf.config.mixture import entry_names, stages
from hfgolf.config.parse import load_config
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.batches import (
    IGNORED,
    MicroBatches,
    Segments,
    build_loader,
    evaluation_extent,
    num_blocks,
    sample_hash,
)
from hfgolf.data.corpus import load_corpus
from hfgolf.data.mixture import MixedStream, Turns
from hfgolf.data.token_cache import load_tokens
from hfgolf.data.tokenizer import mixed_pieces
from hfgolf.system.errors import UserError

T = 8
STAGES = [(0, (7, 2, 1)), (1000, (0, 1, 3)), (4001, (1, 1, 1))]  # from blocks 0, 125 and 501


def text(first, size, is_target=None):
    """Return a stream whose token i is first + i, so that a batch shows where it was read."""
    tokens = np.arange(first, first + size, dtype=np.uint16)
    pieces = np.array([size // 3, size // 3, size - 2 * (size // 3)])
    read = functools.partial(tokens.take, mode="wrap")
    return Stream(
        tokens=tokens, chunks=(tokens,), piece_tokens=pieces, piece_bytes=3 * pieces, read=read, is_target=is_target
    )


@pytest.fixture
def stream():
    """Three texts of 37, 12 and 4 blocks."""
    return MixedStream((text(0, 300), text(1000, 100), text(2000, 37)), ("web", "books", "code"), STAGES)


@pytest.mark.parametrize("parts", [(9, 1), (7, 2, 1), (1, 1, 1), (5, 5, 5, 5, 1), (1, 50, 500), (333, 667), (0, 2, 1)])
def test_each_text_has_its_share_to_less_than_one_sequence_after_any_number_of_them(parts):
    turns = Turns([(0, parts)], T)
    sources, own = turns.at(np.arange(2000))
    counts = turns.counts(np.arange(2001))
    shares = np.arange(2001)[:, None] * np.array(parts) / sum(parts)
    assert np.abs(counts - shares).max() < 1
    assert (counts[sum(parts) * (2000 // sum(parts))] == np.array(parts) * (2000 // sum(parts))).all()
    for source in range(len(parts)):
        assert (sources[:1234] == source).sum() == counts[1234, source]
        assert own[sources == source].tolist() == list(range(counts[-1, source])), "its blocks, one after the other"


def test_each_stage_has_its_own_shares_and_goes_on_where_each_text_was():
    turns = Turns(STAGES, T)
    sources, own = turns.at(np.arange(900))
    for (begin, end), (_, parts) in zip(((0, 125), (125, 501), (501, 900)), STAGES, strict=True):
        found = np.bincount(sources[begin:end], minlength=3)
        assert np.abs(found - (end - begin) * np.array(parts) / sum(parts)).max() < 1
    for source in range(3):
        assert own[sources == source].tolist() == list(range((sources == source).sum()))
    assert not (sources[125:501] == 0).any()
    singly = [turns.at(np.array([position])) for position in range(900)]
    assert [(int(s[0]), int(o[0])) for s, o in singly] == list(zip(sources, own, strict=True))


def test_order_never_changes_between_versions():
    sources, own = Turns(STAGES, T).at(np.array([*range(10), *range(124, 129), 501, 10**12]))
    assert sources.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 2, 2, 1, 2, 0, 1]
    assert own.tolist() == [0, 1, 2, 0, 3, 4, 1, 5, 6, 0, 87, 12, 13, 25, 14, 88, 333333333285]


def load(stream, *, world=1, accumulation=1, blocks_read=0, num_steps=20, **options):
    """Return the global batches of some steps of 24 blocks, with rows in reading order, and the hash of each."""
    shape = {"sequence_length": T, "micro_batch_size": 24 // world // accumulation, "accumulation": accumulation}
    shape |= {"world": world, "seed": 5, "num_steps": num_steps, "blocks_read": blocks_read, **options}
    ranks = [build_loader(stream, **shape, rank=rank) for rank in range(world)]
    batches = [batch for of_ranks in zip(*ranks, strict=True) for batch in of_ranks]
    rows = torch.cat([batch["input_ids"] for batch in batches]).reshape(num_steps, 24, T)
    hashes = torch.stack([batch["sample_hash"] for batch in batches]).reshape(num_steps, -1).sum(1)
    return rows, hashes


def test_batches_do_not_depend_on_processes_or_accumulation(stream):
    for one, other in zip(load(stream, world=2, accumulation=3), load(stream), strict=True):
        assert torch.equal(one, other)


def test_a_loader_continues_at_any_step_and_skips_what_is_excluded(stream):
    straight = load(stream, num_steps=30)[0]
    for step in (1, 5, 6, 20, 21, 29):  # the stages change in steps 5 and 20
        assert torch.equal(load(stream, blocks_read=24 * step, num_steps=30 - step)[0], straight[step:])
    without = load(stream, num_steps=5, excluded=[[24, 48]])[0]
    assert torch.equal(without, torch.cat([straight[:1], straight[2:6]]))


def test_each_text_is_read_in_the_order_of_its_own_epochs(stream):
    rows = load(stream, num_steps=30)[0].reshape(-1, T).numpy()
    for number, part in enumerate(stream.parts):
        own = rows[rows[:, 0] // 1000 == number]
        alone = MicroBatches(part, T, 5 + number)
        assert (own == alone[np.arange(len(own))]["input_ids"].numpy()).all()
        of_epoch = {*own[: num_blocks(len(part), T), 0]}
        assert of_epoch == {*part.tokens[:-1:T][: num_blocks(len(part), T)]}, "each block once"
    assert len(rows[rows[:, 0] >= 2000]) > 10 * 4, "epochs differ by text"


def test_targets_are_the_inputs_one_token_ahead_within_a_text(stream):
    for position in range(0, 700, 50):
        batch = MicroBatches(stream, T, 5)[np.arange(position, position + 50)]
        for row, labels in zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True):
            part = stream.parts[row[0] // 1000]
            first = part.tokens[0]
            assert labels == [first + (token - first + 1) % len(part) for token in row]
        assert batch["input_ids"].stride() == batch["shift_labels"].stride() == (T, 1), "torch would recompile"


def test_starts_are_places_in_the_whole_stream(stream):
    positions = np.arange(100, 180)
    dataset = MicroBatches(stream, T, 5)
    read = stream.read(dataset.starts(positions))
    assert sorted(read.tolist()) == sorted(dataset[positions]["input_ids"][:, 0].tolist())
    assert dataset[positions]["sample_hash"] == sample_hash(dataset.starts(positions))


def test_segments_of_all_texts_end_with_those_of_the_training(stream):
    whole, cut = MicroBatches(stream, T, 5), MicroBatches(stream, T, 5, Segments(2, 60))
    for position in range(90):
        one, other = (dataset[np.array([position])]["input_ids"] for dataset in (cut, whole))
        assert one[0, 0] // 1000 == other[0, 0] // 1000
        assert position < 60 or torch.equal(one, other)
    assert (cut[np.arange(60)]["input_ids"].diff() != 1).any(1).sum() > 50


def test_the_loss_of_conversations_counts_the_targets_of_the_whole_step():
    masks = [(np.arange(size) % every == 0).astype(np.uint8) for size, every in ((300, 2), (100, 7))]
    texts = (text(0, 300, masks[0]), text(1000, 100, masks[1]))
    stream = MixedStream(texts, ("a", "b"), [(0, (1, 2))])
    shape = {"sequence_length": T, "micro_batch_size": 3, "accumulation": 4, "rank": 0, "world": 1}
    batches = [*build_loader(stream, **shape, seed=1, num_steps=2)]
    for step in (batches[:4], batches[4:]):
        num_targets = sum(int((batch["shift_labels"] != IGNORED).sum()) for batch in step)
        assert {float(batch["num_items_in_batch"]) for batch in step} == {num_targets / 4}
    assert (stream.is_target == np.concatenate(masks)).all()


def test_the_stream_of_a_mixture_reads_as_one(stream):
    indices = np.array([[0, 299, 300], [399, 400, 436], [437, 438, 736]])
    assert stream.read(indices).tolist() == [[0, 299, 1000], [1099, 2000, 2036], [0, 1, 299]]
    assert stream.tokens.tolist() == stream.read(np.arange(437)).tolist() and len(stream) == 437
    assert stream.num_bytes == 3 * 437 and stream.is_target is None


def test_evaluation_reads_the_start_of_each_text_by_its_size(stream):
    assert evaluation_extent(stream) == (299 + 99 + 36, 3 * 437)
    assert evaluation_extent(stream, 434) == evaluation_extent(stream)
    targets, num_bytes = evaluation_extent(stream, 250)  # of three pieces of each text, one fits
    assert targets == sum(part.piece_tokens[0] - 1 for part in stream.parts) and num_bytes == 3 * (targets + 3)


def test_a_text_shorter_than_a_block_is_named():
    stream = MixedStream((text(0, 300), text(1000, T)), ("long", "short"), [(0, (1, 1))])
    with pytest.raises(UserError, match=r"^data\.mixture: short: data: the training text has 8 tokens.* 4 or less\.$"):
        MicroBatches(stream, T, 1)


# the config

SIX_LINES = """
data:
  mixture:
    - {files: web/*.parquet, weight: {0: 9, 40000000: 5}}
    - {files: [books, more.txt], weight: 1, val_fraction: 0.1}
    - {hub_name: user/code, weight: {4e7: 4.5}, text_column: content, name: python}
train: {max_tokens: 50000000}
"""


def test_six_lines_describe_a_mixture_with_stages(tmp_path):
    (tmp_path / "mix.yaml").write_text(SIX_LINES)
    resolved = load_config(tmp_path / "mix.yaml")
    data = resolved.config.data
    assert data.source == "mixture" and resolved.sources["data.source"] == "auto"
    assert stages(data.mixture) == [(0, (9, 1, 0)), (40_000_000, (10, 2, 9))]
    sources = data.sources()
    assert [*sources] == ["web", "books", "python"]
    assert [one.source for one in sources.values()] == ["files", "files", "hub"]
    assert [one.val_fraction for one in sources.values()] == [0.05, 0.1, 0.05]
    assert sources["python"].text_column == "content" and sources["books"].text_column == "text"
    (tmp_path / "again.yaml").write_text(resolved.to_yaml())
    assert load_config(tmp_path / "again.yaml").config.data == data
    assert DataSection(**json.loads(json.dumps(dict(data)))) == data, "a checkpoint has it as JSON"


def test_entries_without_a_name_are_called_by_their_texts_no_two_alike():
    entries = [{"files": files} for files in ("web/*.txt", "web/part-?.jsonl.gz", "a/b.c.txt", "*.txt", ["x.md", "y"])]
    assert entry_names(entries) == ["web", "part", "b", "text", "x"]
    entries = [{"files": "a.txt", "name": "a_3"}, {"files": "a.txt"}, {"files": "b/a.txt"}, {"source": "python_stdlib"}]
    assert entry_names(entries) == ["a_3", "a", "a_3_3", "python_stdlib"]


FILES = "{files: a.txt, weight: 1}"


@pytest.mark.parametrize(
    ("mixture", "options", "said"),
    [
        ("{weight: 1}", {}, "data.mixture: entry 1 names no text; state files, hub_name or source."),
        ("{files: a}", {}, "entry 1: weight: no weight is not allowed; allowed: a number above 0, or {tokens: number}"),
        (f"{FILES}, {{files: b, weight: 0}}", {}, "data.mixture: entry 2: weight: 0 is not allowed"),
        ("{files: a, weight: -1}", {}, "entry 1: weight: -1 is not allowed"),
        ("{files: a, weight: true}", {}, "entry 1: weight: True is not allowed"),
        ("{files: a, weight: {100: 2, 1e2: 1}}", {}, 'found duplicate key "100.0"'),
        ("{files: a, weight: {40M: 2}}", {}, "entry 1: weight: {'40M': 2} is not allowed"),
        ("{files: a, weight: {100: 2}}", {}, "no entry has a weight above 0 from 0 tokens on"),
        ("{files: a, weight: {0: 2, 100: 0}}", {}, "no entry has a weight above 0 from 100 tokens on"),
        ("{files: a, weight: {0: 2, 4096000: 1}}", {}, "stage begins at 4,096,000 tokens, but the run ends after 4,09"),
        (f"{FILES}, {{files: b, weight: 0.1234567}}", {}, "exact only over 11,234,567 sequences, more than 100,000"),
        ("{files: a, weight: 1, text_colum: b}", {}, "entry 1 cannot have text_colum; did you mean text_column?"),
        ("{files: a, weight: 1, order: sequential}", {}, "cannot have order; it is of all entries: data.order."),
        ("{files: a, weight: 1, val_fraction: 2}", {}, "entry 1: data.val_fraction: 2 is not allowed"),
        ("{files: [], weight: 1}", {}, "entry 1: data.files is empty"),
        ("{files: a, weight: 1, hub_name: b/c}", {}, None),
        ("{source: hub, files: a, weight: 1}", {}, "entry 1: data.hub_name is null"),
        ("{files: a, weight: 1, name: a b}", {}, "entry 1: name: 'a b' is not allowed"),
        ("{files: a, name: c, weight: 1}, {files: b, name: c, weight: 1}", {}, "two entries have the name c"),
        ("{source: mixture, weight: 1}", {}, "entry 1: data.mixture is empty"),
        ("3", {}, "data.mixture: 3 is not allowed"),
        (FILES, {"data.files": "b.txt"}, "data.files is set beside data.mixture"),
        (FILES, {"data.hub_name": "b/c"}, "data.hub_name is set beside data.mixture"),
        (FILES, {"data.source": "hub"}, "data.mixture has 1 entries, but data.source is hub"),
        ("", {"data.source": "mixture"}, "data.mixture is empty, but data.source is mixture"),
        (FILES, {"train.max_epochs": "2"}, "train.max_epochs: each text of data.mixture has epochs of its own"),
        (FILES, {"golf.forecast_every_steps": "2"}, "do not go with data.mixture"),
        ("{files: a, weight: 1, ids_column: b}", {}, "data.ids_column has only tokens"),
        ("{files: a, weight: 1, messages_column: b}", {}, "conversations do not mix with text"),
        (FILES, {"data.messages_column": "messages"}, None),
    ],
)
def test_what_is_wrong_with_a_mixture_is_one_line(mixture, options, said):
    options = {"data.mixture": f"[{mixture}]", "train.max_steps": "1000"} | options
    arguments = [f"--{key}={value}" for key, value in options.items()]
    if said is None:
        load_config(arguments)
        return
    with pytest.raises(UserError) as error:
        load_config(arguments)
    assert said in str(error.value) and "\n" not in str(error.value)


# the tokens

LINES = [f"{i} and {i * 7 % 10} make {i + i * 7 % 10}." for i in range(300)]


@pytest.fixture
def mixture(write, tmp_path):
    """Return a function that returns the section of a mixture of text, and of rows in a column of another name."""
    write("sums.txt", "\n".join(LINES))
    write("rows.jsonl", "\n".join(json.dumps({"body": f"Row {i} says {line.upper()}"}) for i, line in enumerate(LINES)))

    def build(*weights, **options):
        entries = [{"files": "sums.txt"}, {"files": "rows.jsonl", "text_column": "body", "val_fraction": 0.2}]
        entries = [
            entry | {"files": str(tmp_path / "text" / entry["files"]), "weight": weight}
            for entry, weight in zip(entries, weights, strict=True)
        ]
        return DataSection(source="mixture", mixture=entries, cache_dir=str(tmp_path / "cache"), **options)

    return build


def test_texts_of_a_mixture_are_cached_each_for_itself_with_one_tokenizer(mixture):
    tokens = load_tokens(mixture(3, 1), TokenizerSection(vocab_size=300))
    assert [*tokens.texts] == ["sums", "rows"] and not tokens.is_hit
    for (name, section), part in zip(mixture(3, 1).sources().items(), tokens.train.parts, strict=True):
        one = tokens.texts[name]
        assert part is one.train and one.tokenizer_sha256 == tokens.tokenizer_sha256
        alone = load_tokens(section, TokenizerSection(vocab_size=300), tokenizer=tokens.tokenizer)
        assert alone.is_hit and alone.path == one.path and alone.identity == one.identity
    assert load_tokens(mixture(3, 1), TokenizerSection(vocab_size=300)).is_hit
    whole = tokens.tokenizer.decode(tokens.train.tokens)
    assert "says 5 AND 5 MAKE" in whole and "make" in whole
    tokens.check(wait=True)
    dataset = MicroBatches(tokens.train, 32, seed=1)
    again = pickle.loads(pickle.dumps(dataset))  # as a worker gets it that is spawned
    assert torch.equal(again[np.arange(50)]["input_ids"], dataset[np.arange(50)]["input_ids"])


def test_identity_changes_with_texts_and_weights_but_not_with_their_spelling(mixture, write):
    before = load_corpus(mixture(3, 1)).identity
    assert load_corpus(mixture(0.75, 0.25)).identity == load_corpus(mixture({"0": 6}, 2.0)).identity == before
    assert load_corpus(mixture(1, 3)).identity != before
    assert load_corpus(mixture({"0": 3, "1000": 4}, 1)).identity != before
    write("sums.txt", "\n".join(LINES[1:]))
    assert load_corpus(mixture(3, 1)).identity != before


def test_overlap_and_bytes_are_those_of_all_texts(mixture):
    tokens = load_tokens(mixture(1, 1), TokenizerSection(kind="byte"))
    each = [*tokens.texts.values()]
    assert tokens.overlap["val_documents"] == sum(one.overlap["val_documents"] for one in each)
    assert tokens.val.num_bytes == sum(one.val.num_bytes for one in each) > 0


def test_damage_to_one_text_is_found(mixture):
    tokens = load_tokens(mixture(1, 1), TokenizerSection(kind="byte"))
    path = tokens.texts["rows"].path / "train" / "data-00000-of-00001.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = load_tokens(mixture(1, 1), TokenizerSection(kind="byte"))
    assert not again.texts["rows"].is_hit and again.texts["sums"].is_hit


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"other": "text"}\n', r"data\.mixture: rows: .*body"),
        ("rows.jsonl", '{"body": ""}\n', r"data\.mixture: rows: .*rows\.jsonl has no row with text in column 'body'"),
        ("sums.txt", b"a caf\xe9", r"data\.mixture: sums: "),
        ("rows.jsonl", "", r"^data\.mixture: rows: data\.files: .*rows\.jsonl is empty"),
    ],
)
def test_an_error_names_the_text_of_the_mixture(mixture, write, name, content, said):
    write(name, content)
    with pytest.raises(UserError, match=said):
        load_tokens(mixture(1, 1), TokenizerSection(vocab_size=300))


def test_a_tokenizer_is_trained_on_each_text_by_its_mean_share():
    texts = [Dataset.from_dict({"text": [letter * 1000] * 3000}) for letter in "ab"]
    config = TokenizerSection(vocab_size=300)  # is trained on at most 1.2 MB
    sample = mixed_pieces(texts, [0.75, 0.25], config)
    counts = [sum(piece[0] == letter for piece in sample["text"]) for letter in "ab"]
    assert sum(counts) * 1000 <= 300 * 4096 and counts[0] / sum(counts) == pytest.approx(0.75, abs=0.05)
    few = mixed_pieces([texts[0].select(range(10)), texts[1]], [0.75, 0.25], config)
    assert sum(piece[0] == "a" for piece in few["text"]) == 10
    assert len(mixed_pieces(texts, [0.75, 0.25], TokenizerSection(kind="char"))) == 6000


def test_conversations_mix_with_conversations_in_columns_of_other_names(write, tmp_path):
    turns = [{"role": "user", "content": "one and one"}, {"role": "assistant", "content": "two"}]
    files = [write(f"{column}.jsonl", (json.dumps({column: turns}) + "\n") * 40) for column in ("messages", "chat")]
    entries = [{"files": files[0], "weight": 1}, {"files": files[1], "weight": 1, "messages_column": "chat"}]
    data = DataSection(source="mixture", mixture=entries, messages_column="messages", cache_dir=str(tmp_path / "cache"))
    tokens = load_tokens(data, TokenizerSection(kind="byte"))
    assert all(part.is_target is not None for part in (tokens.train, *tokens.train.parts))
    assert len(tokens.train.is_target) == len(tokens.train)
    assert all(len({*itertools.chain(one.tokenizer.get_vocab())}) == 261 for one in tokens.texts.values())
