"""Inside vLLM, without vLLM: layers' tensors in bins of bytes, which sequences decode, and the error for another version. What vLLM itself
does with them `.ci/vllm` checks, by vllm_arms.py."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from needlework.layers import Attention, Softmax
from needlework.layers.batch import Pages
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.models.presets import preset
from needlework.serve import vllm as plugin
from needlework.serve.bins import Plan, Step, bins, decodes
from tests.serve.vllm_arms import MODELS

PAGE = 16


def model(name):
    torch.manual_seed(0)
    layout, mixers = MODELS[name]
    made = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=64, hidden_size=48, layout=layout, mixers=mixers)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made.double()


def caches(plan, slots=4, pages=12, fill=255):
    """As vLLM hands them out: bytes of anybody's, NaN as numbers, in slots that are larger than what is theirs."""
    made = lambda n, count, nbytes: [torch.full((count, nbytes + 256), fill, dtype=torch.uint8)[:, :nbytes] for _ in range(n)]
    return made(len(plan.slots), slots, plan.slot_bytes), made(len(plan.pages), pages, PAGE * plan.row_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_its_tensors_in_the_bins_and_no_two_share_a_byte(name, dtype):
    plan = Plan.of(model(name).config, dtype)
    tables = plan.tables(*caches(plan, fill=0), PAGE)
    for held, own in zip(plan.held, tables, strict=True):
        assert {n: (x.dtype, x.shape[1:]) for n, x in own.items()} == {n: (p.dtype, p.shape) for n, p in held.fixed.items()} | {
            n: (p.dtype, (PAGE, *p.shape)) for n, p in held.rows.items()
        }
        assert all(x[1].is_contiguous() for x in own.values())
    every = [x for own in tables for x in own.values()]
    for i, x in enumerate(every):
        x.fill_(i + 1)
    assert all(bool((x == i + 1).all()) for i, x in enumerate(every))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_bins_gives_what_it_gives_whole(name):
    """Two sequences whose slots and pages hold anything before: prompts of 20 tokens and of one; then one token decodes beside two; then
    both decode."""
    whole = model(name)
    plan = Plan.of(whole.config, torch.float64)
    tables = plan.tables(*caches(plan), PAGE)
    table, slots = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32), torch.tensor([2, 1])
    windows = {held.window for held in plan.held if held.rows}
    texts, seen, got = torch.randint(64, (2, 22)), [0, 0], [[], []]
    for new, expected in (((20, 1), 0), ((1, 2), 1), ((1, 1), 2)):
        at = [(i, t) for i in range(2) for t in range(seen[i], seen[i] + new[i])]
        seen = [before + count for before, count in zip(seen, new, strict=True)]
        ends, length = torch.tensor([0, new[0], sum(new)], dtype=torch.int32), torch.tensor(seen, dtype=torch.int32)
        rows = torch.tensor([int(table[i, t // PAGE]) * PAGE + t % PAGE for i, t in at])
        own = Step.of(ends, length, (ends, length), len(at), slots=slots)
        assert own.decodes == expected
        paged = Step.of(ends, length, (ends, length), len(at), pages=Pages(table, rows))
        ids, positions = torch.tensor([int(texts[i, t]) for i, t in at]), torch.tensor([t for _, t in at])
        for (i, _), logits in zip(at, whole.serve(ids, tables, own.batch(positions, paged, windows)), strict=True):
            got[i].append(logits)
    for text, logits in zip(texts, got, strict=True):
        with torch.no_grad():
            want = whole(text[None, : len(logits)]).logits[0]
        torch.testing.assert_close(torch.stack(logits), want, rtol=0, atol=1e-10)


def test_a_prompt_of_one_token_is_no_decode_and_neither_is_what_comes_after_it():
    assert decodes([1, 1, 1, 7], [4, 9, 0, 0]) == 2
    assert decodes([1, 3, 1], [4, 9, 5]) == 1
    assert decodes([1, 1], [4, 9]) == 2
    assert decodes([1, 1], [0, 9]) == 0


def test_bins_are_full_and_in_groups_as_many_as_the_others():
    assert bins({}) == ()
    assert sorted(map(len, bins(dict.fromkeys(range(18), 100), 6))) == [1] * 18
    small = dict.fromkeys(range(12), 1) | dict.fromkeys(range(12, 16), 100)
    assert sorted(sum(small[layer] for layer in layers) for layers in bins(small, 4)) == [103] * 4
    assert len(bins({0: 5, 1: 5}, 7)) == 2


@pytest.mark.parametrize("name", ["atma-polar-memory", "carve-1.3b-swa", "ccq-gdn-500m"])
def test_bins_hold_little_more_than_the_layers_do(name):
    plan = Plan.of(preset(name), torch.bfloat16)
    held = sum(part.nbytes for layer in plan.held for part in layer.fixed.values())
    assert held <= len(plan.slots) * plan.slot_bytes <= 1.03 * held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_is_as_many_numbers_in_every_dtype(dtype):
    """vLLM asks for a row's numbers before it knows the dtype."""
    small = Attention(heads=1, head_dim=4, attend=Softmax())
    config = NeedleworkConfig(vocab_size=64, hidden_size=48, layout="S", mixers={"S": small})
    assert Plan.of(config, dtype).row_bytes * 4 == Plan.of(config, torch.float32).row_bytes * dtype.itemsize


def test_another_version_refuses_our_models_where_one_is_made(monkeypatch):
    known = {}
    other = ModuleType("vllm")
    other.__version__, other.ModelRegistry = "0.33.1+cu130", SimpleNamespace(register_model=known.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", other)
    plugin.register()
    with pytest.raises(ImportError, match=r"needlework serves inside vLLM 0\.32\.0, and this is 0\.33\.1\+cu130"):
        known["NeedleworkForCausalLM"](vllm_config=None)


def test_vllm_finds_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"needlework": f"{plugin.__name__}:{plugin.register.__name__}"}
