"""PaTH as a layer: where its reflections come from, what it holds, and serving past the ends of its blocks."""

import pytest
import torch

from needlework.layers import Attention, LucidPath, Path, Rope
from needlework.layers.norm import l2
from needlework.ops.path import BLOCK, chunk_lucid_path, chunk_path
from tests.layers.test_mixers import DIM, attention, build, close, sample
from tests.layers.test_serving import served

PATHS = {
    "solved": attention(LucidPath(conv=3)),
    "solved in a window": attention(LucidPath(window=30)),
    "every key": attention(Path(rank=4)),
    "forgetting": attention(Path(rank=4, forget=True)),
    "forgetting in a window": attention(Path(window=30, forget=True)),
    "a window of one": attention(Path(window=1, forget=True)),
    "a window": attention(Path(window=30, rank=None, conv=None)),
    "a window shorter than a convolution's taps": attention(Path(window=2, conv=4)),
}


@pytest.mark.parametrize("conv", (None, 3))
def test_reflections_are_unit_rows_of_a_convolved_map_and_strengths_lie_below_two(conv):
    mixer, x = build(attention(Path(rank=None, conv=conv))), sample(9)
    beta, w, _ = mixer.attend.reflect(x, None, None)
    z = x @ mixer.attend.reflect.w.weight.T
    if conv:
        taps, padded = mixer.attend.reflect.conv.weight[:, 0], torch.cat([torch.zeros_like(z[:, :2]), z], 1)
        z = torch.nn.functional.silu(sum(taps[:, j] * padded[:, j : j + 9] for j in range(3)))
    assert close(w, l2(z.unflatten(-1, (2, 8))))
    assert close(beta, 2 * torch.sigmoid(x @ mixer.attend.reflect.beta.weight.T + mixer.attend.reflect.beta.bias))


def test_the_layer_reads_what_the_op_gives():
    mixer, x = build(attention(Path(rank=4, scale=0.7), kv_heads=1)), sample(20)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    beta, w, _ = mixer.attend.reflect(x, None, None)
    assert close(mixer(x)[0], mixer.o_proj(chunk_path(q, k, v, beta, w, scale=0.7).o.flatten(-2)))


def test_the_layers_forget_gate_is_foxs():
    mixer, x = build(attention(Path(rank=4, forget=True))), sample(20)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    beta, w, _ = mixer.attend.reflect(x, None, None)
    g = torch.sigmoid(x @ mixer.attend.forget.weight.T + mixer.attend.forget.bias).log()
    assert close(mixer(x)[0], mixer.o_proj(chunk_path(q, k, v, beta, w, g=g).o.flatten(-2)))


def test_lucid_path_reads_solved_values_as_path_reads_values():
    mixer, x = build(attention(LucidPath(scale=0.7))), sample(20)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    beta, w, _ = mixer.attend.reflect(x, None, None)
    y = chunk_lucid_path(k, v, beta, w).y
    assert close(mixer(x)[0], mixer.o_proj(chunk_path(q, k, y, beta, w, scale=0.7).o.flatten(-2)))


def test_a_position_beside_it_is_refused():
    with pytest.raises(
        ValueError, match="attention: position is 'rope', expected None with 'path', which has positions of its own"
    ):
        attention(Path(), position=Rope()).build(DIM)


def test_a_sequence_takes_float32_keys_values_an_open_block_and_the_convolutions_inputs():
    mixer = Attention(heads=8, kv_heads=2, head_dim=16, attend=Path(window=1000)).build(DIM)
    for T in (7, 5000):
        pages, opened = 2 * (16 * 4 + 16 * 2) * min(T, 1000), BLOCK * 2 * (16 * 2 + 4)
        assert mixer.state_size(T, torch.bfloat16) == pages + opened + 2 * 2 * 16 * 2 + 8
        gates = Attention(heads=8, kv_heads=2, head_dim=16, attend=Path(window=1000, forget=True)).build(DIM)
        assert gates.state_size(T, torch.bfloat16) == mixer.state_size(T, torch.bfloat16) + 8 * 8 * min(T, 1000)
        solved = Attention(heads=8, kv_heads=2, head_dim=16, attend=LucidPath(window=1000)).build(DIM)
        assert solved.state_size(T, torch.bfloat16) == pages + 2 * 4 * min(T, 1000) + opened + 8


@pytest.mark.parametrize("name", PATHS)
def test_serving_goes_on_past_the_ends_of_blocks(name):
    """Prompts that end inside, at and behind a block, in chunks, and decodes that end one, alone and beside the others."""
    mixer = build(PATHS[name])
    steps = [
        {2: BLOCK - 3, 5: BLOCK},
        {2: 1, 5: 1, 0: 30},
        {2: 1, 0: 40},
        {2: 1, 5: 70},
        {2: 1, 0: 1, 5: 1},
        {5: 1, 6: 2 * BLOCK + 1, 2: 5},
    ]
    steps += [{2: 1, 5: 1, 0: 1, 6: 1}] * 3 + [{2: 50}, {2: 1, 6: 64}, {2: 1, 6: 1}]
    total = {slot: sum(step.get(slot, 0) for step in steps) for slot in (0, 2, 5, 6)}
    torch.manual_seed(2)
    xs = {slot: sample(n, B=1)[0] for slot, n in total.items()}
    found, _ = served(mixer, steps, xs, pages=60)
    for slot, x in xs.items():
        assert close(found[slot], mixer(x[None])[0][0]), f"slot {slot}"
