"""From a recipe to its page with a model whose answers are known, so that every number that is printed is known too.

The copier finds its last five tokens again, at most `reach` tokens back, and is sure of what came next there; elsewhere it knows nothing:
all 257 tokens are alike. Its reach is a weight, the first bias of its head: a model that was not trained, kept and loaded reaches nothing.
"""

import csv
import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from needlework.data import byte_tokenizer, decode_bytes, load_corpus
from needlework.data.rng import generator
from needlework.experiment.compare import results
from needlework.experiment.evaluate import Evaluation, measure
from needlework.experiment.recipe import build
from needlework.experiment.runner import Phase, run
from needlework.layers import Softmax, SwiGLU
from needlework.layers.attention import Attention
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.recipes import demo
from needlework.report import write_report
from needlework.train import AdamW, Cooldown, TrainConfig

CONTEXT, SURE, VOCABULARY = 5, 60.0, 257
LENGTHS, TOKENS, ROWS = (192, 384), 1536, 5
TASK = demo.NeedleMix(dense_pairs=(1, 2), sparse_pairs=(1, 2))
ORIGINAL = NeedleworkForCausalLM.forward


def copied(row: list[int], t: int, reach: int) -> int | None:
    """What the copier says comes after row[t]: what came the last time that the same five tokens came."""
    for s in range(t - 1, max(CONTEXT - 2, t - reach - 1), -1):
        if row[s - CONTEXT + 1 : s + 1] == row[t - CONTEXT + 1 : t + 1]:
            return row[s + 1]
    return None


def copier(model, input_ids=None, targets=None, **kwargs):
    """`NeedleworkForCausalLM.forward`: training is the model's own."""
    if targets is not None:
        return ORIGINAL(model, input_ids, targets=targets, **kwargs)
    assert not model.training
    reach = round(model.lm_head.bias[0].item())
    logits = torch.zeros(*input_ids.shape, VOCABULARY)
    for b, row in enumerate(input_ids.tolist()):
        for t in range(CONTEXT - 1, len(row)):
            if (token := copied(row, t, reach)) is not None:
                logits[b, t, token] = SURE
    return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def corpus(small_text):
    return load_corpus(small_text, byte_tokenizer())


def recipe(small_text, start, name="copier", lr=0.0, steps=1):
    attention = Attention(heads=2, kv_heads=1, head_dim=8, attend=Softmax())
    model = NeedleworkConfig(
        vocab_size=VOCABULARY, hidden_size=16, layout="MM", mixers={"M": attention}, mlp=SwiGLU(hidden=8),
        head_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    return dataclasses.replace(
        demo.recipe("softmax", small_text), name=name, title=name.title(), model=model, start=start,
        phases=(Phase(steps=steps, batch=2, length=64, task=TASK),),
        train=TrainConfig(steps=steps, seed=3, optim=AdamW(lr=lr), schedule=Cooldown(flat=1.0), checkpoint_every=100),
        evaluate=Evaluation(lengths=LENGTHS, tokens=TOKENS, rows=ROWS),
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(small_text, tmp_path_factory):
    """The results of copiers that reach 0, 150 and 10,000 tokens, and their recipes."""
    tmp_path, recipes = tmp_path_factory.mktemp("runs"), []
    for reach in (0, 150, 10_000):
        first = recipe(small_text, None)
        model = build(first)
        with torch.no_grad():
            model.lm_head.bias[0] = reach
        model.save_pretrained(tmp_path / f"start-{reach}")
        recipes.append(recipe(small_text, str(tmp_path / f"start-{reach}"), f"reach {reach}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeedleworkForCausalLM, "forward", copier)
        return recipes, [run(one, tmp_path / one.name) for one in recipes]


def asked(corpus, T, pairs):
    """Of each row of the needle tasks: how far back each asked pair is, and the row. Written from the task's words."""
    name = "single needle None" if pairs == 1 else f"{pairs} needles"
    found = []
    for r in range(max(ROWS, TOKENS // T)):
        rng = generator(name, 1, 0, r)
        length = T + 1 - 22 * pairs
        places = np.sort(rng.integers(length + 1, size=pairs))
        order = rng.permutation(pairs)
        # pair number i starts after places[i] tokens of text and i pairs; the query number j of the order after all text and pairs
        starts = [places[i] + 11 * i for i in range(pairs)]
        queries = [length + 11 * pairs + 11 * j for j in range(pairs)]
        found.append([queries[j] - starts[order[j]] for j in range(pairs)])
    return found


def expected(corpus, T, reach):
    """(nats on held-out text, share of a needle's digits, of four needles' digits) of a copier, by hand."""
    nats = []
    for r in range(TOKENS // T):
        start = generator("held-out text", 1, 0, r).integers(len(corpus.held_out.tokens) - (T + 2) + 1)
        row = corpus.held_out.tokens[start : start + T + 1].tolist()
        for t in range(T):
            said = copied(row, t, reach) if t >= CONTEXT - 1 else None
            sure = SURE + math.log(1 + 256 * math.exp(-SURE))
            nats.append(math.log(VOCABULARY) if said is None else sure - SURE * (said == row[t + 1]))
    shares = [np.mean([d <= reach for row in asked(corpus, T, n) for d in row]) for n in (1, 4)]
    return np.mean(nats), *shares


def test_every_number_that_a_run_measures_is_the_one_that_is_known(runs, corpus):
    _, entries = runs
    for entry, reach in zip(entries, (0, 150, 10_000), strict=True):
        for T in LENGTHS:
            nats, one, four = expected(corpus, T, reach)
            assert entry["loss"][str(T)] == pytest.approx(nats, rel=1e-6)
            n = max(ROWS, TOKENS // T)
            for task, share, pairs in (("needle", one, 1), ("needles", four, 4)):
                score = entry[task][str(T)]
                assert score["accuracy"] == score["exact"] == pytest.approx(share, abs=1e-12), (task, T, reach)
                assert (score["digits"], score["values"]) == (4 * pairs * n, pairs * n)
    blind, near, far = entries
    for T in map(str, LENGTHS):
        assert blind["needle"][T]["accuracy"] == 0 and blind["loss"][T] == pytest.approx(math.log(257))
        assert far["needle"][T]["accuracy"] == far["needles"][T]["accuracy"] == 1
        assert blind["loss"][T] != near["loss"][T] != far["loss"][T]
    assert 0 < near["needle"]["384"]["accuracy"] < 1  # it copies up to a distance, never beyond


def test_what_a_run_says_of_its_model_and_its_training_is_counted_by_hand(runs, small_text, corpus):
    recipes, entries = runs
    D, V, hidden = 16, VOCABULARY, 8
    layer = D * (16 + 8 + 8) + 16 * D + 3 * D * hidden + 2 * D  # q, k, v, o; the channel mixer; two norms
    pages = lambda T: 2 * (2 * 1 * 8 * T * 4 + 8)  # two layers of keys and values of one head of eight float32, and a length
    ids, labels = recipes[0].batch(corpus, 0)
    for one, entry in zip(recipes, entries, strict=True):
        assert entry["parameters"] == 2 * layer + D + D * V + V * D + V
        assert entry["state_bytes"] == {str(T): pages(T) for T in LENGTHS}
        assert (entry["seed"], entry["train_length"], entry["train"]["steps"], entry["train"]["tokens"]) == (3, 64, [1], 128)
        logits = ORIGINAL(build(one), ids).logits.double()
        nats = -logits.log_softmax(-1)[labels >= 0].gather(1, labels[labels >= 0][:, None]).mean()
        assert entry["train"]["loss"] == [pytest.approx(nats.item(), rel=1e-5)]


def test_every_number_on_the_page_is_the_one_that_was_measured(runs, corpus, tmp_path):
    recipes, entries = runs
    write_report(results("known", tuple(recipes), corpus.manifest, entries), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    tables = re.findall("<table>(.*?)</table>", page, re.S)
    found, cost = (re.findall(r'<tr data-mixer="(\d)">.*?</th>(.*?)</tr>', table, re.S) for table in tables)
    assert [number for number, _ in found] == [number for number, _ in cost] == ["0", "1", "2"]
    of_row = lambda row: re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)
    for (_, row), (_, costs), entry, reach in zip(found, cost, entries, (0, 150, 10_000), strict=True):
        nats, shares = expected(corpus, LENGTHS[0], reach)[0], [expected(corpus, T, reach)[1:] for T in LENGTHS]
        pages = [f"{2 * (2 * 8 * T * 4 + 8) / 1024:.3g} KiB" for T in LENGTHS]
        wanted = [f"{entry['parameters']:,}", "0", *pages, f"{entry['train']['loss'][0]:.3f}", f"{nats:.3f}"]
        assert of_row(costs) == [*wanted, f"{entry['train']['tokens_per_second']:,.0f}", f"{entry['train']['seconds']:,.0f}"]
        assert of_row(row) == [f"{100 * of[task]:.1f}" for task in (0, 1) for of in shares]
        tips = re.findall(r'data-tip="([\d.]+) % of ([\d,]+) digits, ([\d.]+) % of ([\d,]+) values whole"', row)
        n = {T: max(ROWS, TOKENS // T) for T in LENGTHS}
        assert [(int(d), int(v)) for _, d, _, v in tips] == [(4 * k * n[T], k * n[T]) for k in (1, 4) for T in LENGTHS]
        assert [float(a) for a, *_ in tips] == [pytest.approx(100 * of[task], abs=0.05) for task in (0, 1) for of in shares]
    near = expected(corpus, LENGTHS[-1], 10_000)[1]
    written = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [(r["mixer"], r["seed"], r["task"], r["length"]) for r in written] == [
        (entry["name"], "3", task, str(T)) for entry in entries for task in ("needle", "needles") for T in LENGTHS
    ]
    for r, reach in zip(written, (reach for reach in (0, 150, 10_000) for _ in range(4)), strict=True):
        nats, *shares = expected(corpus, int(r["length"]), reach)
        assert float(r["accuracy"]) == pytest.approx(shares[r["task"] == "needles"], rel=1e-5) and float(
            r["loss"]
        ) == pytest.approx(nats, rel=1e-5)
    assert near == 1 and "at 3×" in page and "100 % (Reach 10000)" in page and "at 6×, 100 % (Reach 10000)" in page


def test_a_run_keeps_its_curves_and_samples(runs, corpus):
    """One step was logged. The copier knows nothing of text it has not seen: all tokens are alike, and the first of them is id 0."""
    for entry in runs[1]:
        log = entry["train"]["log"]
        assert log["steps"] == [1] and log["lr"] == [0.0] and log["grad_norm"][0] > 0 and log["memory"][0] > 0
    untaught = runs[1][0]["samples"]
    for r, sample in enumerate(untaught):
        row = corpus.held_out.sample(generator("held-out text", 1, 0, r), 97)[:96]
        assert sample["prompt"] == decode_bytes(row[:64]).decode() and sample["text"] == decode_bytes(row[64:]).decode()
        assert sample["continuation"] == "\0" * 32
    assert len(untaught) == 3


def by_one_token(model, corpus, T):
    """The mean nats on the held-out text, one token at a time in plain operations."""
    nats = []
    for r in range(TOKENS // T):
        row = corpus.held_out.sample(generator("held-out text", 1, 0, r), T + 2)[: T + 1]
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(row[None])).logits[0].double()
        nats += [-logits[t].log_softmax(0)[row[t + 1]].item() for t in range(T)]
    return np.mean(nats)


def test_what_is_measured_is_the_model_that_was_trained_and_kept(small_text, corpus, tmp_path):
    """Not the model at its start, nor a fresh one."""
    entry = run(one := recipe(small_text, None, lr=0.02, steps=6), tmp_path / "run")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")
    T = LENGTHS[0]
    assert entry["loss"][str(T)] == pytest.approx(by_one_token(kept, corpus, T), rel=1e-5)
    assert entry["loss"][str(T)] != pytest.approx(by_one_token(build(one), corpus, T), rel=1e-3)
    assert entry["train"]["loss"][-1] < entry["train"]["loss"][0]


def test_full_context_is_the_same_weights_without_windows(small_text, corpus, tmp_path):
    one = recipe(small_text, None, lr=0.02, steps=6)
    windows = {"M": Attention(heads=2, kv_heads=1, head_dim=8, attend=Softmax(window=3))}
    one = dataclasses.replace(
        one, model=one.model.replaced(mixers=windows), evaluate=dataclasses.replace(one.evaluate, full_context=True)
    )
    entry = run(one, tmp_path / "run")
    windowed = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")
    whole = build(recipe(small_text, None))  # without a window
    whole.load_state_dict(windowed.state_dict())
    for T in LENGTHS:
        found, free = by_one_token(windowed, corpus, T), by_one_token(whole, corpus, T)
        assert abs(found - free) > 1e-3
        assert entry["loss"][str(T)] == pytest.approx(found, rel=1e-5)
        assert entry["full_context"]["loss"][str(T)] == pytest.approx(free, rel=1e-5)


def test_the_loss_by_position_of_a_model_that_knows_only_the_second_half_is_its_cross_entropy_there(corpus):
    """In stretches that double: sure of nothing in the first 128 tokens, of all after them."""

    class Late(torch.nn.Module):
        device = torch.device("cpu")
        config = SimpleNamespace(mixers={}, vocab_size=VOCABULARY)

        def forward(self, ids, use_cache=False):
            assert not self.training
            logits = SURE * F.one_hot(ids.roll(-1, 1), VOCABULARY).float()
            logits[:, :128] = 0
            return SimpleNamespace(logits=logits)

    evaluation = Evaluation(lengths=(256,), tokens=512, rows=2, tasks=(), positions=512)
    found = measure(Late(), corpus, evaluation)["positions"]
    assert found["from"] == [0, 128, 256] and found["rows"] == 2
    assert found["loss"] == [pytest.approx(math.log(257)), pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9)]
