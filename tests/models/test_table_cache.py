"""`generate` on tables that layers advance in place gives what it gives on states that it hands over."""

from functools import cache

import pytest
import torch

from needlework.layers import (
    CCQ,
    Attention,
    Carve,
    Differential,
    GatedConv,
    Lucid,
    Mamba3,
    Memory,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    Softmax,
)
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, TableCache

MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta(), read=CCQ()),
    "C": Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve(rank=4, content_chunk=16)),
    "S": Attention(heads=4, kv_heads=2, head_dim=8, attend=Softmax(window=24), position=Rope()),
    "P": Attention(heads=2, head_dim=16, attend=Polar(), memory=Memory()),
    "L": Attention(heads=2, head_dim=16, attend=Lucid(), position=Rope()),
    "D": Attention(heads=2, head_dim=16, attend=Differential(), position=Rope()),
    "G": GatedConv(),
    "M": Mamba3(heads=2, key_dim=8, value_dim=8, rank=2),
}
V = 67


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=V, hidden_size=32, layout="".join(MIXERS), mixers=MIXERS)
    return NeedleworkForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def prompt():
    """Three rows, padded on the left."""
    ids = torch.randint(V, (3, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, :29] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def plain(model, prompt):
    """A function: what `generate` writes on states that it hands over."""

    @cache
    def write(**way):
        torch.manual_seed(3)
        return model.generate(**prompt, **way)

    return write


def tables(model, tokens=40):
    """Less room than the test's tokens need."""
    return TableCache(model.config, model.model.held(), tokens=tokens)


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_generate_gives_the_same_tokens(model, prompt, plain, way):
    torch.manual_seed(3)
    found = model.generate(**prompt, past_key_values=tables(model), max_new_tokens=60, **way)
    assert found.shape[1] == 90 and torch.equal(found, plain(max_new_tokens=60, **way))


def test_a_conversation_goes_on(model):
    """Tokens come in pieces of many and of one, and rows are chosen between them."""
    ids = torch.randint(V, (2, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole, cache = model(ids).logits, tables(model)
        start = model(ids[:, :20], past_key_values=cache).logits
        cache.reorder_cache(torch.tensor([1, 0]))
        middle = model(ids[:, 20:21].flip(0), past_key_values=cache).logits.flip(0)
        cache.batch_select_indices(torch.tensor([1]))
        rest = model(ids[:1, 21:], past_key_values=cache).logits
    assert cache.get_seq_length() == 50 and cache.length.tolist() == [50]
    close = lambda a, b: torch.allclose(a, b, rtol=0, atol=1e-12)
    assert close(start, whole[:, :20]) and close(middle, whole[:, 20:21]) and close(rest, whole[:1, 21:])
    cache.reset()
    with torch.no_grad():
        assert close(model(ids[:, :20], past_key_values=cache).logits, whole[:, :20]), "as new"


def test_a_row_that_changes_its_place_takes_its_length_along(model, prompt):
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    order, newest = torch.tensor([1, 2, 0]), torch.tensor([[5], [6], [7]])
    with torch.no_grad():
        cache = tables(model)
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.reorder_cache(order)
        found = model(newest, past_key_values=cache).logits
        for row, own in enumerate(order):
            alone = torch.cat([ids[own][mask[own].bool()], newest[row]])[None]
            torch.testing.assert_close(found[row, -1], model(alone).logits[0, -1], rtol=0, atol=1e-12)


class Recorder:
    """In the place of CUDA graphs: runs the recorded step again, on the addresses that it was recorded with."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, step):
        self.recorded += 1
        out = step()

        def replay():
            self.replayed += 1
            out.copy_(step())

        return replay, out


@pytest.mark.parametrize(
    "way, recorded, replayed",
    [
        ({}, 2, 57 - 2),  # 59 steps of one token; at the 35th a page more makes other tables
        ({"num_beams": 3}, 0, 0),  # whose rows change places
        ({"max_new_tokens": 3}, 0, 0),
    ],
    ids=("greedy", "beams", "short"),
)
def test_steps_of_one_token_are_replayed_where_the_tables_stay(model, prompt, plain, way, recorded, replayed):
    served, settings = tables(model), {"max_new_tokens": 60} | way
    served.record = recorder = Recorder()
    assert torch.equal(model.generate(**prompt, past_key_values=served, **settings), plain(**settings))
    assert (recorder.recorded, recorder.replayed) == (recorded, replayed)


def test_hidden_states_are_those_of_the_forward(model):
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        found = model(ids, output_hidden_states=True, past_key_values=tables(model)).hidden_states
    assert len(found) == len(MIXERS) + 1 and all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True)
    )


def test_packed_documents_and_gradients_are_refused(model):
    ids = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ValueError, match="packed documents need a NeedleworkCache"):
        model(ids, past_key_values=tables(model), cu_seqlens=torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match="no_grad"):
        model(ids, past_key_values=tables(model))
