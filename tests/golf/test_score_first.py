"""Test-time training: what is scored first, what an adapter may see, and a model that is afterwards what it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hfgolf.evaluate.windows import plan_windows, score, sum_nats
from hfgolf.golf.legality import Reader
from hfgolf.golf.score_first import LoraAdapter, SgdAdapter, document_chunks, score_first, stream_chunks
from hfgolf.system.errors import UserError

SEPARATOR = 256


@pytest.fixture
def model(build_model):
    return build_model().eval()


@pytest.fixture
def logits(model):
    return lambda inputs: model(inputs).logits


@pytest.fixture
def tokens():
    """Three documents, each repeating a few bytes of its own: there is something to learn from their beginnings."""
    random = np.random.default_rng(0)
    parts = [np.append(SEPARATOR, np.tile(random.integers(0, 256, 5), count)) for count in (2, 6, 12)]
    return np.concatenate(parts)


class Recorder:
    """An adapter that learns nothing and keeps what it is handed."""

    def __init__(self) -> None:
        self.seen = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.seen.append("end")

    def start_document(self):
        self.seen.append("start")

    def adapt(self, tokens, windows):
        self.seen.append((tokens, windows))


class Rows(Reader):
    """A reader that checks nothing, and keeps the distributions of each commit."""

    def __init__(self, tokens) -> None:
        super().__init__(tokens, 257, check=None)
        self.rows = []

    def commit(self, predict, count=1):
        super().commit(lambda tokens: self.rows.append(predict(tokens)) or self.rows[-1], count)


@pytest.mark.parametrize("stride", [4, 16])
def test_adapter_sees_only_scored_tokens(logits, tokens, stride):
    plan = plan_windows("sliding", len(tokens), 16, stride)
    chunks = stream_chunks(plan, 40)
    reader = Reader(tokens, 257, check=None)

    class Watcher(Recorder):
        def adapt(self, tokens, windows):
            assert reader.num_seen - 1 == chunks[len(self.seen) - 1].windows[-1, 2], "the chunk is committed"
            assert len(tokens) == windows[-1, 2] + 1, "no token after the last that was scored"
            super().adapt(tokens, windows)

    recorder = Watcher()
    score_first(reader, logits, plan, chunks, batch_size=2, adapter=recorder)
    assert np.array_equal(reader.seen, tokens)
    handed = recorder.seen[1:-1]
    assert len(handed) == len(chunks) - 1, "the last chunk is not trained on"
    places = np.concatenate([seen[windows[0, 1] :] for seen, windows in handed])
    assert np.array_equal(places, tokens[1 : 1 + len(places)]), "each chunk once, in order"


def test_documents_start_fresh_and_their_last_chunk_is_not_trained_on(logits, tokens):
    plan, chunks = document_chunks(len(tokens), 16, 10, np.flatnonzero(tokens == SEPARATOR))
    recorder = Recorder()
    assert plan.targets().tolist() == [*range(1, len(tokens))]
    for begin, first, last in plan.windows.tolist():
        assert last - first < 10 and last - begin <= 16
        start = np.flatnonzero(tokens[:first] == SEPARATOR)[-1]
        assert begin == max(start, first + 9 - 16), "the context does not tell where the document ends"
    score_first(Reader(tokens, 257, check=None), logits, plan, chunks, batch_size=2, adapter=recorder)
    names = ["adapt" if isinstance(item, tuple) else item for item in recorder.seen]
    numbers = [-(-length // 10) - 1 for length in (11, 31, 60)]  # targets of each document, its closing separator too
    assert names == [name for number in numbers for name in ["start"] + ["adapt"] * number] + ["end"]


def test_a_chunk_is_at_most_a_window(tokens):
    plan, _ = document_chunks(len(tokens), 16, 100, np.flatnonzero(tokens == SEPARATOR))
    assert plan.targets().tolist() == [*range(1, len(tokens))]
    assert (plan.windows[:, 2] - plan.windows[:, 0]).max() == 16


def adapters(model, logits, rate):
    sgd = SgdAdapter(model, logits, length=16, num_chunks=5, learning_rate=rate, epochs=2)
    return {"sgd": sgd, "lora": LoraAdapter(model, logits, rank=4, learning_rate=rate)}


def nats(logits, tokens, kind, adapter):
    if kind == "sgd":
        plan = plan_windows("sliding", len(tokens), 16, 8)
        chunks = stream_chunks(plan, 32)
    else:
        plan, chunks = document_chunks(len(tokens), 16, 8, np.flatnonzero(tokens == SEPARATOR))
    reader = Reader(tokens, 257, check=None)
    score_first(reader, logits, plan, chunks, batch_size=2, adapter=adapter)
    return reader.nats, plan


@pytest.mark.parametrize(("kind", "rate"), [("sgd", 1.0), ("lora", 0.03)])
def test_adapting_helps_on_repeated_text_and_restores_the_model(model, logits, tokens, kind, rate):
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    plain, plan = nats(logits, tokens, kind, None)
    whole = score(lambda inputs, labels: sum_nats(logits(inputs), labels), tokens.__getitem__, plan, 4)
    assert plain == pytest.approx(whole, rel=1e-6)
    assert nats(logits, tokens, kind, adapters(model, logits, 0.0)[kind])[0] == pytest.approx(plain, rel=1e-6)
    adapter = adapters(model, logits, rate)[kind]
    adapted = nats(logits, tokens, kind, adapter)[0]
    assert adapted < 0.9 * plain
    assert nats(logits, tokens, kind, adapter)[0] == adapted, "a second pass starts from the same weights"
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(weight.requires_grad for weight in model.parameters())
    assert nats(logits, tokens, kind, None)[0] == plain


def test_lora_starts_each_document_from_the_model_itself(model, logits, tokens):
    plan, chunks = document_chunks(len(tokens), 16, 8, np.flatnonzero(tokens == SEPARATOR))
    plain, adapted = Rows(tokens), Rows(tokens)
    for reader, adapter in ((plain, None), (adapted, LoraAdapter(model, logits, learning_rate=0.03))):
        score_first(reader, logits, plan, chunks, batch_size=2, adapter=adapter)
    same = [torch.equal(a, b) for a, b in zip(plain.rows, adapted.rows, strict=True)]
    assert same == [chunk.starts_document for chunk in chunks]


def test_lora_step_is_one_adamw_step_on_the_targets_of_the_chunk(model, logits, tokens):
    begin, first, last = 3, 9, 14
    adapter = LoraAdapter(model, logits, rank=4, learning_rate=0.01)
    with adapter:
        adapter.start_document()
        downs = [down.detach().clone() for down, _ in adapter.pairs]
        ids = torch.from_numpy(tokens)
        loss = F.cross_entropy(logits(ids[None, begin:last])[0, first - begin - 1 :], ids[first : last + 1])
        gradients = torch.autograd.grad(loss, [up for _, up in adapter.pairs])
        adapter.adapt(tokens[: last + 1], np.array([[begin, first, last]]))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().clamp(min=1)
        for (down, up), before, gradient in zip(adapter.pairs, downs, gradients, strict=True):
            # the first step of AdamW from zero is the rate times the sign of the gradient, but for eps
            clipped = gradient / norm
            torch.testing.assert_close(up, -0.01 * clipped / (clipped.abs() + 1e-10))
            torch.testing.assert_close(down, before * (1 - 0.01 * 0.5))  # no gradient while up is 0: decay only


@pytest.mark.parametrize("kind", ["sgd", "lora"])
def test_adapters_restore_the_model_after_a_break_or_an_error(model, logits, tokens, kind):
    before = logits(torch.arange(8)[None]).detach()
    adapter = adapters(model, logits, 1.0)[kind]
    plan = plan_windows("sliding", len(tokens), 16, 8)
    reader = Reader(tokens, 257, check=None)

    def breaking(inputs):
        if reader.num_seen > 40:
            assert not torch.equal(logits(torch.arange(8)[None]), before)
            raise KeyboardInterrupt
        return logits(inputs)

    with pytest.raises(KeyboardInterrupt):
        score_first(reader, breaking, plan, stream_chunks(plan, 32), batch_size=2, adapter=adapter)
    assert torch.equal(logits(torch.arange(8)[None]), before)
    with pytest.raises(UserError, match="LoRA needs linear layers"), LoraAdapter(torch.nn.Embedding(3, 4), logits):
        pass
    diverged = adapters(model, lambda inputs: logits(inputs) * torch.inf, 0.1)[kind]
    with pytest.raises(UserError, match=r"^The gradient of test-time training is not finite; lower its learning rate"):
        nats(logits, tokens, kind, diverged)
    assert torch.equal(logits(torch.arange(8)[None]), before)
