"""What the second study asks of a model, of models whose answers are known."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from needlework.data import ASKED, Corpus, CorpusConfig, RecallMix, byte_tokenizer, held_out_text, load_corpus
from needlework.data.bigrams import counts, repeated
from needlework.eval.nats import token_nats
from needlework.experiment.answers import Context, context, objective, recall
from needlework.experiment.evaluate import Evaluation, check_measurement

V = 257
MIX = RecallMix(sparse=1.0, overwritten=0.5, sparse_pairs=(2, 4))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for i in range(12):
        (root / f"{i}.txt").write_bytes(bytes(rng.integers(97, 117, size=4000, dtype=np.uint8)))
    return load_corpus(CorpusConfig(kind="files", paths=(root,), held_out=0.3), byte_tokenizer())


def says(logits_of):
    """A model whose logits for a row [T] are logits_of(the row's number)."""
    rows = iter(range(10**6))
    return lambda ids: torch.stack([logits_of(next(rows)) for _ in ids])


@pytest.mark.parametrize("batch_size", [1, 7])
def test_recall_is_a_mean_over_buckets_of_distance_and_told_apart_for_overwritten_keys(corpus, batch_size):
    """A model that is sure of answers up to 255 tokens away and of overwritten keys, and knows nothing of the others."""
    scored = MIX.scored(corpus, 5, 40, 700)

    def logits(row):
        sure = (scored.distance[row] < 256) | scored.overwritten[row]
        return 50.0 * F.one_hot(scored.targets[row].clamp(min=0), V) * sure[:, None]

    found = recall(says(logits), corpus, MIX, 5, 40, 700, batch_size)
    at = scored.targets != -100
    assert [b["from"] for b in found["buckets"]] == [1, 64, 256] and found["digits"] == at.sum() == sum(
        b["digits"] for b in found["buckets"]
    )
    far = at & (scored.distance >= 256)
    share = 1 - scored.overwritten[far].double().mean().item()
    assert [b["nll"] for b in found["buckets"]] == pytest.approx([0, 0, share * math.log(V)], abs=1e-6)
    assert found["nll"] == pytest.approx(share * math.log(V) / 3, abs=1e-6)  # over buckets, and not over digits
    assert found["accuracy"] == pytest.approx(1 - share / 3, abs=0.02)  # a guess is the token 0, which is no digit
    assert found["overwritten"]["nll"] == pytest.approx(0, abs=1e-6) and found["kept"]["buckets"][-1]["nll"] == pytest.approx(
        math.log(V)
    )
    assert found["overwritten"]["digits"] + found["kept"]["digits"] == found["digits"]
    assert recall(says(logits), corpus, RecallMix(sparse=1.0), 5, 40, 700, 8)["overwritten"] is None


def test_bigrams_are_counted_and_found_again_in_their_row(corpus, monkeypatch):
    monkeypatch.setattr("needlework.data.bigrams.CHUNK", 1000)
    tokens = corpus.train.tokens.tolist()
    brute = {}
    for pair in pairwise(tokens):
        brute[pair] = brute.get(pair, 0) + 1
    table = counts(corpus.train, V)
    assert {(i // V, i % V): int(n) for i, n in enumerate(table) if n} == brute and table.sum() == len(tokens) - 1
    rows = held_out_text(corpus, 0, 6, 90).input_ids.numpy()
    most = int(np.median(list(brute.values())))
    expected = [
        [pair in {*pairwise(row[:t])} and brute.get(pair, 0) <= most for t, pair in enumerate(pairwise(row), 1)]
        for row in rows.tolist()
    ]
    found = repeated(rows, table, V, most)
    assert found.tolist() == expected and 0 < found.sum() < found.size / 2


def test_the_gain_of_a_context_is_late_less_early_and_repeated_bigrams_have_their_own_loss(corpus):
    """A model that knows every token from position 40 on, and the last token of every bigram that its row had before and training
    rarely."""
    c = Context(rows=9, length=80, early=(0, 20), late=(40, 80), rare=105)
    rows = held_out_text(corpus, 3, 9, 81).input_ids
    again = torch.from_numpy(repeated(rows.numpy(), counts(corpus.train, V), V, 105))

    def logits(row):
        sure = again[row] | (torch.arange(80) >= 40)
        return torch.cat([50.0 * F.one_hot(rows[row, 1:], V) * sure[:, None], torch.zeros(1, V)])

    found = context(says(logits), corpus, c, 3, 4)
    early = (~again[:, :20]).double().mean().item() * math.log(V)
    assert found["tokens"] == again.sum() > 20 and found["repeated"] == pytest.approx(0, abs=1e-6)
    assert (found["early"], found["late"], found["gain"]) == pytest.approx((early, 0, -early), abs=1e-5)
    unsure = ~again & (torch.arange(80) < 40)
    assert found["loss"] == pytest.approx(unsure.double().mean().item() * math.log(V), rel=1e-6)
    with pytest.raises(ValueError, match=r"context: late is \(1024, 2048\), expected \(from, to\) within length = 80"):
        Context(length=80, early=(0, 20))


def test_the_objective_is_what_a_step_on_held_out_rows_would_have(corpus):
    mix = RecallMix(dense=0.2, sparse=0.4, sparse_pairs=(1, 2), dense_pairs=(1, 2))
    here = Corpus(corpus.held_out, corpus.held_out, corpus.tokenizer, {})
    ids, labels, answers, emphasis = mix.batch(here, 4, 0, 16, 100)
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
    found = objective(lambda ids: table[ids], corpus, mix, 4, 16, 100, 5)
    nats = F.cross_entropy(table[ids].transpose(1, 2), labels, reduction="none")
    wanted = {
        "loss": (emphasis * nats).sum() / emphasis.sum(),
        "text": nats[answers == 0].mean(),
        "asked": nats[answers == ASKED].mean(),
    }
    assert found == pytest.approx({name: x.item() for name, x in wanted.items()}, rel=1e-5)
    assert token_nats(lambda ids: table[ids], torch.cat([ids, labels[:, -1:]], 1), batch_size=3) == pytest.approx(
        nats, rel=1e-5
    )


def test_a_measurement_that_cannot_be_made_is_refused_before_a_run(corpus):
    for changes, said in (
        ({"recall": MIX}, "T = 30 is too short"),
        ({"side": "other"}, "there is no side 'other'"),
        ({"objective": MIX}, "too short"),
    ):
        with pytest.raises(ValueError, match=said):
            check_measurement({}, corpus, Evaluation(lengths=(30,), tokens=30, rows=1, tasks=(), **changes))
