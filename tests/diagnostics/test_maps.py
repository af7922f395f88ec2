"""Maps by head: with them a rule's read is a sum over values, which is what they claim. Overwriting and chunkability, each by its
formula."""

import dataclasses
import math

import pytest
import torch

from needlework.data import SelectiveKeyOverwrite
from needlework.diagnostics import carve, chunkability, maps, overwrite
from needlework.diagnostics.rules import calls
from needlework.layers import Attention, Delta, Polar, Recurrent, Softmax
from needlework.layers.write import WriteRule
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from tests.diagnostics.test_diagnostics import SIZES, model, tokens

LINEAR = ["linear", "gla", "deltanet", "gated-deltanet", "kda", "qdelta", "carve", "ccq", "softmax", "lucid", "atma"]


def given(call):
    """The rule's arguments again."""
    return (call.rule.chunk, *call.arguments) if isinstance(call.rule, WriteRule) else call.arguments


def read(call):
    """What the rule reads [T H V], and its values [T H V], a head for each that reads."""
    with torch.no_grad():
        o = call.rule(*given(call), **call.keywords)[0][0]
    v = call.arguments[-1][0]
    return o, v.repeat_interleave(o.shape[1] // v.shape[1], 1)


def summed(one, v):
    return torch.einsum("hts,shv->thv", one.weights.double(), v)


@pytest.mark.parametrize("mixer", LINEAR)
def test_a_rule_reads_the_sum_of_values_with_its_maps_weights(mixer):
    m, ids = model(mixer), tokens(1)
    found = maps(m, ids)
    pairs = [(call, one) for call, one in zip(calls(m, ids), found, strict=True) if one.rule != "polar"]
    assert pairs and [one.layer for one in found] == sorted(one.layer for one in found)
    for call, one in pairs:
        o, v = read(call)
        assert not one.weights.triu(1).any()  # nothing later
        assert (summed(one, v) - o).norm() <= 2 * 2**-24 * math.sqrt(len(v)) * o.norm()  # the map is in float32


def test_gdn2s_map_has_the_mean_of_its_write_gate():
    m, ids = model("gdn2"), tokens(1)
    for call in calls(m, ids):
        gate = call.keywords["write"].mean(-1, keepdim=True).expand_as(call.keywords["write"])
        o = call.rule(*given(call), **call.keywords | {"write": gate})[0][0]
        (one,) = [one for one in maps(m, ids) if one.layer == call.layer]
        assert torch.allclose(summed(one, call.arguments[-1][0]), o, atol=1e-5)


def test_diff_transformers_map_is_the_difference_before_its_norm():
    m, ids = model("differential"), tokens(1)
    for call, one in zip(calls(m, ids), maps(m, ids), strict=True):
        o, v = read(call)
        assert torch.allclose(call.rule._normed(summed(one, v)), o, atol=1e-5) and (one.weights < 0).any()


@pytest.mark.parametrize("window", [None, 9])
def test_polars_map_is_the_weight_of_real_keys(window):
    torch.manual_seed(0)
    mixer = Attention(heads=4, kv_heads=2, head_dim=8, attend=Polar(window=window), qk_norm=True)
    m = NeedleworkForCausalLM(
        NeedleworkConfig(vocab_size=97, hidden_size=16, layout="P", mixers={"P": mixer}, initializer_range=0.3)
    ).double()
    (call,), (one,) = calls(m, tokens(1)), maps(m, tokens(1))
    o, v = read(call)
    missing = 1 - one.weights.double().sum(-1).T[..., None]  # of the null sink
    s = summed(one, v) + missing * call.rule.v_null
    assert torch.allclose(s / s.norm(dim=-1, keepdim=True), o, atol=1e-5)
    hidden = torch.ones(40, 40, dtype=torch.bool).tril(-(window or 40))
    assert not one.weights[:, hidden].any() and one.weights.sum(-1).max() < 1


def test_a_layer_without_a_rule_has_no_map_and_looking_changes_nothing():
    mixer = Attention(heads=2, head_dim=8, attend=Softmax())
    m = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=97, hidden_size=16, layout="S", mixers={"S": mixer})).train()
    before = m(tokens(1)).logits
    assert len(maps(m, tokens(1))) == 1 and overwrite(m, tokens(1)) == []
    assert m.training and torch.equal(m(tokens(1)).logits, before)
    assert not any(module._forward_pre_hooks for module in m.modules())


# selective key overwrite


def settled(mixer, beta):
    """A model whose write strength is a constant, that never decays."""
    m = model(mixer, layers=1)
    with torch.no_grad():
        strength = m.model.blocks[0].mixer.write.beta.project
        strength.weight.zero_()
    m.model.blocks[0].mixer.write.beta.offset = beta
    return m


def test_a_memory_that_writes_nothing_has_an_error_of_one_and_one_that_writes_all_a_small_one():
    ids = tokens(1, 400)
    (nothing,), (all_,) = overwrite(settled("deltanet", -1e4), ids), overwrite(settled("deltanet", 1e4), ids)
    for share, error in nothing.error.items():
        task = SelectiveKeyOverwrite(K=24, V=12, keys=(round(24 * share),) * 2).batch(0, 0, 1, 400)
        assert error == pytest.approx(task.values.square().mean().item(), rel=1e-6)
    assert all_.error[0.25] < 0.25 < nothing.error[0.25] and all_.error[0.25] < all_.error[1.0]


def test_a_single_key_that_is_overwritten_is_held_exactly():
    torch.manual_seed(0)
    mixer = Recurrent(heads=1, key_dim=4, value_dim=6, write=Delta())
    m = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=97, hidden_size=16, layout="R", mixers={"R": mixer})).double()
    m.model.blocks[0].mixer.write.beta.offset = 1e4  # β = 1
    (one,) = overwrite(m, tokens(1))
    assert one.error[0.25] < 1e-9  # K/4 is one key


def test_a_number_of_keys_without_room_in_the_text_is_left_out():
    (one,) = overwrite(settled("deltanet", 0.0), tokens(1, 12))
    assert {*one.error} == {0.25}  # 6 keys and 3 overwrites in 12 tokens; 12 and 3 are too many


# chunkability


def test_chunkability_is_the_staleness_of_the_same_weights_with_other_chunks():
    m, ids = model("carve"), tokens(1)
    found = chunkability(m, ids, (8, 20))
    rules = [block.mixer.write for block in m.model.blocks]
    assert [rule.config.content_chunk for rule in rules] == [SIZES.content_chunk] * 2  # as it was
    for rule in rules:
        rule.config = dataclasses.replace(rule.config, content_chunk=20)
    assert found[20] == [layer.staleness for layer in carve(m, ids, 20)] and found[8] != found[20]
