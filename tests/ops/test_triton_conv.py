"""The convolution's kernels in the interpreter: values and every gradient are those of the plain form, tables those of a loop."""

import os

import pytest
import torch

from needlework.ops.common.packing import document_positions
from needlework.ops.conv import causal_conv, causal_conv_slots, step_conv
from needlework.ops.runtime.launch_configs import forced, rows
from needlework.ops.unit.reference import unit_heads
from needlework.testing.compare import EXACT, poisoned, relative
from needlework.testing.rows import covering
from tests.ops.test_conv import SERVED, STEPS, Table, check_slots_are_the_loop, check_steps_are_a_chunk, inputs

pytest.importorskip("triton")
from needlework.ops.conv.depthwise.chunk import conv_backward_kernel
from needlework.ops.conv.depthwise.op import ENGINE, Form, _constants, tokens_of_a_run

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

SMALL = {"BC": 16, "BT": 8}  # channels past a block's end, and sequences in several programs
BLOCK = {"BC": 16}


def small():
    return forced(
        "conv/depthwise", conv_forward_kernel=SMALL, conv_backward_kernel=SMALL, conv_past_backward_kernel=BLOCK, conv_keep_kernel=BLOCK,
        conv_step_kernel=BLOCK,
    )  # fmt: skip


def differentiated(impl: str, x, weight, bias, state, dy, dlast, **settings) -> tuple[torch.Tensor, ...]:
    """y, the new state, and the gradients of x, weight, bias and, if one is given, the state."""
    given = [t.clone().requires_grad_() for t in (x, weight, bias, state) if t is not None]
    named = dict(zip(("weight", "bias", "state"), (weight, bias, state), strict=True))
    named = dict(zip((name for name, t in named.items() if t is not None), given[1:], strict=True))
    y, last = causal_conv(given[0], **named, **settings, impl=impl)
    y = torch.cat(y, -1)
    return y.detach(), last.detach(), *torch.autograd.grad((y, last), given, (dy, dlast))


# tokens, taps, ends, parts; with the state, sequences end before the third token, at a run's end and just past it
SHAPES = (
    (1, 4, None, None), (3, 2, None, (3, 17)), (21, 3, None, None), (21, 4, None, (16, 4)), (21, 4, [0, 1, 1, 9, 21], (1, 18, 1)),
)  # fmt: skip
CARRIED = (
    (1, 4, None, (3, 17)), (2, 3, None, None), (3, 2, None, None), (21, 4, None, (1, 18, 1)),
    (21, 4, [0, 1, 1, 3, 7, 17, 21], (16, 4)), (12, 3, [0, 0, 8, 10, 12], None),
)  # fmt: skip


# the same, and heads of each part: several a tile, the last tile's not all there, as wide as a tile and wider, narrower than their lanes
UNIT = (
    (1, 4, None, (16, 4), (16, 0)), (3, 2, None, (96,), (48,)), (21, 4, None, (15, 5, 20), (5, 5, 0)), (22, 3, None, (192, 68), (192, 68)),
    (21, 4, [0, 1, 1, 3, 7, 17, 21], (256, 128, 6), (128, 128, 2)), (13, 3, [0, 0, 8, 10, 13], (4, 256, 16), (0, 256, 4)),
)  # fmt: skip


def check_the_kernels_are_the_plain_form(shape, after: str, carried: bool, unit: tuple[int, ...] | None = None) -> None:
    T, width, ends, parts = shape
    generator = torch.Generator().manual_seed(T)
    B, C = (1 if ends else 2), 20 if unit is None else sum(parts)
    N = len(ends) - 1 if ends else B
    sizes = (B, T, C), (C, width), (C,), (N, width - 1, C), (B, T, C), (N, width - 1, C)
    x, weight, bias, state, *cotangents = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    given = x, weight, None if after == "none" else bias, state if carried else None, *cotangents
    settings = {"after": after, "parts": parts, "unit": unit, "cu_seqlens": None if ends is None else torch.tensor(ends)}
    with small(), poisoned():
        found = differentiated("triton", *given, **settings)
    names = "y", "state", "dx", "dweight", *(() if after == "none" else ("dbias",)), "dstate"
    for name, got, want in zip(names, found, differentiated("torch", *given, **settings), strict=False):
        assert relative(got, want) <= EXACT, name
    with small():
        assert all(map(torch.equal, found, differentiated("triton", *given, **settings))), "not the same twice"


@pytest.mark.parametrize(("shape", "after"), covering(SHAPES, ("none", "silu", "add"), pairs=False))
def test_kernels_are_the_plain_form(shape, after):
    check_the_kernels_are_the_plain_form(shape, after, False)


@pytest.mark.parametrize(("shape", "after"), covering(CARRIED, ("silu", "none", "add"), pairs=False))
def test_kernels_go_on_from_a_state(shape, after):
    check_the_kernels_are_the_plain_form(shape, after, True)


@pytest.mark.parametrize("carried", (False, True))
@pytest.mark.parametrize(("shape", "after"), covering(UNIT, ("silu", "none", "add"), pairs=False))
def test_kernels_make_heads_unit_as_the_plain_form_does(shape, after, carried):
    *shape, unit = shape
    check_the_kernels_are_the_plain_form(shape, after, carried, unit)


def test_a_head_s_norm_is_that_of_y_before_it_is_rounded():
    x, weight = (t.half() for t in inputs(21, C=48))
    ((found,), _) = causal_conv(x, weight.float(), unit=[16], after="silu", impl="triton")
    ((y,), _) = causal_conv(x.float(), weight.float(), after="silu", impl="triton")
    assert found.dtype == torch.half and torch.equal(found, unit_heads(y, 16).half())
    assert not torch.equal(found, unit_heads(y.half(), 16))


@pytest.mark.parametrize(("sizes", "after"), covering(SERVED, ("silu", "none", "add"), pairs=False))
def test_on_slots_it_is_a_loop_over_tokens(sizes, after):
    with small(), poisoned():
        check_slots_are_the_loop("triton", sizes, after, torch.float64 if after == "add" else torch.float32)


@pytest.mark.parametrize(("width", "after", "parts"), STEPS)
def test_steps_are_a_chunk(width, after, parts, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    with small(), poisoned():
        check_steps_are_a_chunk("triton", width, after, parts)


def test_calls_on_a_table_compile_whole(monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    (x, weight), ends = inputs(7, B=1), torch.tensor([0, 2, 7])

    def served(x, table, slots, fresh):
        given = {"state": table, "slots": slots, "parts": [2, 3], "after": "silu"}
        return causal_conv_slots(x, weight, ends, fresh=fresh, **given), step_conv(x[0, :2], weight, **given)

    torch._dynamo.reset()
    found, want = (Table.of([4, 0], [False, True], 3, 5) for _ in range(2))
    results = torch.compile(served, fullgraph=True, backend="aot_eager")(x, found.state, found.slots, found.fresh)
    for got, expected in zip(results, served(x, want.state, want.slots, want.fresh), strict=True):
        assert all(map(torch.equal, got, expected))
    assert torch.equal(found.bytes(), want.bytes())


@pytest.mark.parametrize("ends", (None, [0, 2, 7]))
def test_the_operators_pass_opcheck(ends):
    from needlework.ops.conv.depthwise.op import Past, conv_slots_triton, conv_step_triton, conv_triton, conv_triton_bwd

    x, weight = inputs(7, B=1 if ends else 2)
    at = torch.tensor(ends) if ends else None
    documents = (at, *document_positions(at, 7)) if ends else (None, None, None)
    table = Table.of([4, 0], [False, True], 3, 5)
    state = torch.randn(2, 3, 5, dtype=torch.float64)
    values = ("test_schema", "test_faketensor")
    for held in (None, state):
        own = [t if t is None else t.clone().requires_grad_() for t in (x, weight, held)]
        torch.library.opcheck(
            conv_triton,
            (*own[:2], *Past(own[2], *documents), "silu", [2, 3], False, [0, 3]),
            test_utils=(*values, "test_autograd_registration"),
        )
        dy = list(x.split([2, 3], -1))
        torch.library.opcheck(
            conv_triton_bwd, (dy, x, weight, *Past(held, *documents), "silu", False, [0, 3]), test_utils=values
        )
    torch.library.opcheck(
        conv_slots_triton,
        (x, weight, *Past(table.state, *documents, table.slots, table.fresh), "silu", [2, 3], False),
        test_utils=values,
    )
    torch.library.opcheck(
        conv_step_triton, (x[:, 0].repeat(2, 1)[:2], weight, table.state, table.slots, "add", [5], False), test_utils=values
    )


@pytest.mark.parametrize("chosen", rows(ENGINE), ids=lambda row: row.name)
def test_a_thread_of_a_wide_head_has_as_many_channels(chosen):
    threads = lambda head: (
        32 * (c := _constants(chosen, conv_backward_kernel, torch.half, Form(4, False, "silu", head)))["num_warps"] / c["BC"]
    )
    assert threads(0) == threads(64) == threads(200) == threads(1024)


def test_a_prompt_s_runs_are_short_and_change_no_bit():
    assert [tokens_of_a_run(3, T, 128, 1056, 8) for T in (1, 512, 4096, 65536)] == [8, 8, 8, 128]
    assert tokens_of_a_run(1, 10**6, 128, 1056, 8) == 128
    x, weight = inputs(150)
    found = []
    for programs in (1, 10**6):
        with forced("conv/depthwise", shared={"programs": programs}):
            found.append(torch.cat(causal_conv(x, weight, impl="triton")[0], -1))
    assert torch.equal(*found)
