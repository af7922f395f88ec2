"""A model with PaTH layers generates past the ends of their blocks: with a cache, in tables, with left pads, and with beams."""

import pytest
import torch

from needlework.layers import Attention, LucidPath, Path
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, TableCache
from needlework.ops.path import BLOCK

V = 67
MIXERS = {
    "H": Attention(heads=4, kv_heads=2, head_dim=8, attend=Path(rank=4)),
    "L": Attention(heads=4, kv_heads=2, head_dim=8, attend=LucidPath()),
    "W": Attention(heads=2, head_dim=8, attend=Path(window=24, rank=None, conv=None, forget=True)),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=V, hidden_size=32, layout="HLW", mixers=MIXERS, initializer_range=0.2)
    return NeedleworkForCausalLM(config).double().eval()


@pytest.fixture
def prompt():
    """Three rows, padded on the left, whose blocks end at different steps."""
    ids = torch.randint(V, (3, BLOCK - 2), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :50] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def test_a_cache_gives_the_tokens_of_whole_forwards(model, prompt):
    found = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    for n in range(3):
        ids = prompt["input_ids"][n][prompt["attention_mask"][n].bool()][None]
        for token in found[n, BLOCK - 2 :]:
            with torch.no_grad():
                assert model(ids, use_cache=False).logits[0, -1].argmax() == token
            ids = torch.cat([ids, token[None, None]], 1)


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=str)
def test_tables_give_the_same_tokens(model, prompt, way):
    cache = TableCache(model.config, model.model.held(), tokens=40)
    found = [
        model.generate(**prompt, max_new_tokens=20, do_sample=False, **way, **more) for more in ({}, {"past_key_values": cache})
    ]
    assert torch.equal(*found)
