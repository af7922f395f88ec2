"""What an op is given and cannot take is a ValueError that names the argument, what was passed and what was expected."""

import inspect
import re
from functools import partial
from itertools import product

import pytest
import torch

from needlework.ops.conv import causal_conv, causal_conv_slots, step_conv
from needlework.ops.lucid import solve_pages
from needlework.ops.paged import paged_attention, paged_differential, paged_polar, write_pages
from needlework.ops.specs import specs
from needlework.testing.compare import make, tokens

# of attention over pages the specs' forms are no public functions, and have no step
ALL = pytest.mark.parametrize("spec", [spec for spec in specs() if spec.step], ids=lambda spec: spec.name)
NO_TENSORS = (None, [[0.5]], 0.5, "k")
T = 6


def refused(call, name, value, **arguments):
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}\b.*(got|has size)") as error:
        call(**arguments | {name: value})
    assert "expected" in str(error.value)


def forms(spec):
    """Each form of an op, and its inputs."""
    inputs = make(spec, 1, T)
    whole = {
        "torch": partial(spec.chunk, impl="torch"),
        "reference": partial(spec.chunk, impl="reference"),
        "recurrent": spec.recurrent,
    }
    yield from ((form, inputs) for form in whole.values())
    yield partial(spec.step, state=spec.table(1)), tokens(spec, inputs, lambda x: x[:, 0])


@ALL
def test_what_is_no_tensor(spec):
    for form, inputs in forms(spec):
        for name in inputs:
            required = inspect.signature(form).parameters[name].default is inspect.Parameter.empty
            for value in NO_TENSORS:
                # an optional tensor that the rule needs is refused by the rule that lacks it: see each op's own tests
                if value is not None or (required and not (name == "g" and spec.name.startswith("qdelta"))):
                    refused(form, name, value, **inputs)


@ALL
def test_a_tensor_without_axes(spec):
    for form, inputs in forms(spec):
        for name in inputs:
            with pytest.raises(ValueError, match=rf"^{name}: .*got"):
                form(**inputs | {name: torch.tensor(0.5, dtype=torch.float64)})


CU_SEQLENS = {
    "a list": [0, 2, T],
    "a number": T,
    "empty": torch.zeros(0, dtype=torch.int64),
    "one number": torch.tensor([T]),
    "floats": torch.tensor([0.0, T]),
    "bytes": torch.tensor([0, T], dtype=torch.uint8),
    "two axes": torch.tensor([[0, T]]),
    "not from 0": torch.tensor([1, T]),
    "not to T": torch.tensor([0, T - 1]),
    "past T": torch.tensor([0, T + 1]),
    "falling": torch.tensor([0, 4, 2, T]),
    "below 0": torch.tensor([0, -1, T]),
}


@ALL
@pytest.mark.parametrize("value", CU_SEQLENS.values(), ids=CU_SEQLENS)
def test_cu_seqlens_that_pack_nothing(spec, value):
    *whole, _ = forms(spec)
    for form, inputs in whole:
        for state in (False, True):
            refused(partial(form, output_final_state=state), "cu_seqlens", value, **inputs)


@ALL
def test_cu_seqlens_of_a_batch(spec):
    inputs = make(spec, 2, T)
    for form in (spec.chunk, spec.recurrent):
        refused(form, "cu_seqlens", torch.tensor([0, T]), **inputs)


@ALL
def test_a_state_that_is_none(spec):
    *whole, (step, token) = forms(spec)
    for value in ([0.0], 0.0, "state", (1, 2)):
        for form, inputs in whole:
            refused(form, "initial_state", value, **inputs)
        refused(step, "state", value, **token)
    refused(step, "state", None, **token)
    for value in ([0], 0, torch.tensor([0.0]), torch.tensor([0, 0]), torch.tensor([True])):
        refused(step, "slots", value, **token)


@ALL
def test_sizes_that_are_no_count(spec):
    inputs = make(spec, 1, T)
    for name in {"chunk_size", "window", "content_chunk"} & inspect.signature(spec.chunk).parameters.keys():
        for value in ("8", 8.0, 0, -1, *([] if name == "window" else [None])):
            refused(spec.chunk, name, value, **inputs)


def test_a_convolution_names_what_it_cannot_take():
    x, weight = torch.ones(1, T, 4), torch.ones(4, 3)
    for name, value in (
        ("x", None),
        ("x", [1.0]),
        ("x", x[0]),
        ("weight", None),
        ("weight", weight[:3]),
        ("cu_seqlens", [0, T]),
    ):
        refused(causal_conv, name, value, **{"x": x, "weight": weight})
    for value in ((), (2, 2), (3,), (-2,), (5,)):
        refused(causal_conv, "unit", value, x=x, weight=weight)
    state = torch.zeros(1, 2, 4)
    for call in (causal_conv, causal_conv_slots, step_conv):
        x = torch.ones(1, 4) if call is step_conv else torch.ones(1, T, 4)
        for value in ([1.0], state[0], state[:, :1], state[..., :3], state[:0]):
            refused(call, "state", value, x=x, weight=weight)
        if call is causal_conv:
            continue
        refused(call, "state", None, x=x, weight=weight)
        for value in ([0], torch.tensor([0.0]), torch.tensor([0, 0]), torch.tensor([True])):
            refused(call, "slots", value, x=x, weight=weight, state=state)
    for value in ([True], torch.tensor([1]), torch.tensor([True, False])):
        refused(causal_conv_slots, "fresh", value, x=x[:, None], weight=weight, state=state)


def test_attention_over_pages_names_what_it_cannot_take():
    spec = next(spec for spec in specs() if spec.name == "polar")
    inputs = make(spec, 1, 16)
    k, v, parameters = inputs["k"], inputs["v"], {n: x for n, x in inputs.items() if n not in "qkv"}
    pages = {"k_pages": k, "v_pages": v, "block_table": torch.zeros(1, 1).int(), "length": torch.tensor([16]).int()}
    decode = pages | {"q": inputs["q"][0, -1:]}
    prefill = pages | {"q": inputs["q"][0, -T:], "cu_seqlens": torch.tensor([0, T])}
    forms = (paged_attention, {}), (paged_differential, {"lam": torch.tensor(0.5)}), (paged_polar, parameters)
    for (form, own), given in product(forms, (decode, prefill)):
        call = given | own
        form(**call)
        for name, value in product(call, NO_TENSORS):
            if name != "cu_seqlens" or value is not None:
                refused(form, name, value, **call)
    for form, own in forms:
        for value in ("a list", "a number", "empty", "floats", "not from 0", "past T"):
            refused(form, "cu_seqlens", CU_SEQLENS[value], **prefill | own)
    new = {"k": k[0], "v": v[0], "k_pages": k, "v_pages": v, "rows": torch.arange(16)}
    for name in new:
        for value in NO_TENSORS:
            refused(write_pages, name, value, **new)


def test_a_solve_on_pages_names_what_it_cannot_take():
    spec = next(spec for spec in specs() if spec.name == "lucid/beta")
    inputs = {name: x[0] for name, x in make(spec, 1, T).items()} | {"precondition": "beta"}
    page = lambda x: x.new_zeros(1, 16, *x.shape[1:])
    given = inputs | {"k_pages": page(inputs["k"]), "y_pages": page(inputs["v"]), "block_table": torch.zeros(1, 1).int()}
    given |= {"length": torch.tensor([T]), "rows": torch.arange(T), "cu_seqlens": torch.tensor([0, T])}
    for impl in ("torch", "reference"):
        solve_pages(**given, impl=impl)
        for name in given.keys() - {"precondition", "cu_seqlens"}:
            for value in NO_TENSORS:
                refused(solve_pages, name, value, **given, impl=impl)
        for value in CU_SEQLENS.keys() - {"not to T"}:
            refused(solve_pages, "cu_seqlens", CU_SEQLENS[value], **given, impl=impl)
