"""Modes of differentiation that no operator has are refused by name; none gives a wrong derivative. vmap is right or refused."""

import importlib
import pkgutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import needlework.layers.rope
import needlework.ops
from needlework.ops.attention.fused import streamed
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.specs import specs
from needlework.testing.compare import assert_close, leaves, make

pytest.importorskip("triton")
for module in pkgutil.walk_packages(needlework.ops.__path__, "needlework.ops."):
    importlib.import_module(module.name)
OPERATORS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("needlework::"))
ALL = pytest.mark.parametrize("spec", [x for x in specs() if "gradients" not in x.skip], ids=lambda spec: spec.name)
REGISTERED = pytest.mark.parametrize(
    "spec", [spec for spec in specs() if "custom_ops_pass_opcheck" not in spec.skip], ids=lambda spec: spec.name
)
WITHOUT_KERNELS = ("path/lucid", "path/lucid-window")
REFUSED = "needlework::.*is not implemented.*impl='reference'"


def of(operator):
    return getattr(torch.ops.needlework, operator.removeprefix("needlework::")).default


def arguments(operator, tensor):
    """A value of every argument's type. A refusal comes before any is looked at."""
    values = {
        "Tensor": tensor, "Optional[Tensor]": None, "List[Tensor]": [tensor], "Optional[int]": None, "int": 1, "bool": False,
        "float": 1.0, "Optional[float]": None, "str": "", "Optional[str]": None, "List[int]": [1],
    }  # fmt: skip
    return [values[str(argument.type)] for argument in of(operator)._schema.arguments]


def read(spec):
    """The inputs that a result depends on: beside a read query of its own, a delta rule does not read q."""
    inputs = make(spec, 1, 5)
    return [name for name in inputs if name != "q" or "q_read" not in inputs]


def results(function, inputs, **settings):
    return tuple(x for _, x in leaves(function(**inputs, **settings)) if x.is_floating_point())


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_refuses_forward_mode_by_its_name(operator):
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(torch.ones(1), torch.ones(1))
        with pytest.raises(NotImplementedError, match=f"{operator}: forward-mode .* is not implemented.*impl='reference'"):
            of(operator)(*arguments(operator, dual))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_refuses_gradients_by_function_transforms(operator):
    def call(x):
        of(operator)(*arguments(operator, x))
        return x.sum()

    with pytest.raises(NotImplementedError, match=f"{operator}: reverse mode by function transforms"):
        torch.func.grad(call)(torch.ones(1))


@REGISTERED
@pytest.mark.parametrize("impl", ("torch", "triton"))
def test_a_tangent_of_any_input_is_refused(spec, impl, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that the kernels' operators take tensors of a CPU; none is launched
    inputs = make(spec, 1, 5)
    if impl == "triton" and spec.name in WITHOUT_KERNELS:
        pytest.skip("it has no kernels")
    for name in read(spec):
        call = lambda x, name=name: results(spec.chunk, inputs | {name: x}, impl=impl)
        x = inputs[name]
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.func.jvp(call, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=REFUSED):
            call(forward_ad.make_dual(x, x))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=REFUSED):
            call(forward_ad.make_dual(x.clone().requires_grad_(), x))


@REGISTERED
def test_a_second_derivative_is_refused(spec):
    """Also where a result's own gradient is a number: what the backward reads follows from the input."""
    inputs = make(spec, 1, 5)
    for name in read(spec):
        x = inputs[name].clone().requires_grad_()
        total = sum(y.sum() for y in results(spec.chunk, inputs | {name: x}, impl="torch"))
        (dx,) = torch.autograd.grad(total, x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            torch.autograd.grad(dx.sum(), x)


@REGISTERED
def test_composed_transforms_are_refused(spec):
    inputs = make(spec, 1, 5)
    name = read(spec)[0]
    loss = lambda x: sum(y.square().sum() for y in results(spec.chunk, inputs | {name: x}, impl="torch"))
    grad = torch.func.grad(loss)
    x = inputs[name]
    for refused in (
        grad,
        lambda x: torch.func.vjp(loss, x),
        torch.func.jacrev(loss),
        torch.func.jacfwd(loss),
        torch.func.hessian(loss),
        lambda x: torch.func.jvp(grad, (x,), (x,)),
        lambda x: torch.func.vmap(grad)(x[None]),
    ):
        with pytest.raises(NotImplementedError, match=REFUSED):
            refused(x)


@ALL
def test_the_reference_has_every_mode_as_the_refusal_says(spec):
    inputs = make(spec, 1, 5)
    names = tuple(inputs)
    call = lambda *x: results(spec.chunk, dict(zip(names, x, strict=True)), impl="reference", output_final_state=True)
    primals = tuple(inputs.values())
    tangents = tuple(make(spec, 1, 5, seed=1).values())
    values, along = torch.func.jvp(call, primals, tangents)
    gradients = torch.func.vjp(call, *primals)[1](values)
    forward = sum((a * y).sum() for a, y in zip(along, values, strict=True))
    reverse = sum((d * t).sum() for d, t in zip(gradients, tangents, strict=True))
    assert forward != 0
    torch.testing.assert_close(forward, reverse, rtol=1e-10, atol=1e-10)


@ALL
def test_vmap_is_a_loop_over_its_axis_and_takes_gradients_outside(spec):
    several = [make(spec, 1, 5, seed) for seed in range(3)]
    stack = {name: torch.stack([x[name] for x in several]) for name in several[0]}
    call = lambda inputs: results(spec.chunk, inputs, impl="torch")

    def found(function):
        inputs = {name: x.clone().requires_grad_() for name, x in stack.items()}
        values = function(inputs)
        loss = sum(x.square().sum() for x in values)
        gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        named = {f"d{name}": d for name, d in zip(inputs, gradients, strict=True) if d is not None}
        return named | {str(i): x.detach() for i, x in enumerate(values)}

    def loop(inputs):
        rows = [call({name: x[i] for name, x in inputs.items()}) for i in range(3)]
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    assert_close(found(torch.func.vmap(call)), found(loop), "vmap")


@ALL
def test_cotangents_by_the_batch_are_right_or_refused(spec):
    inputs = {name: x.requires_grad_() for name, x in make(spec, 1, 5).items()}
    value = results(spec.chunk, inputs, impl="torch")[0]
    cotangents = torch.stack([value.detach(), torch.ones_like(value)])
    gradient = lambda y, batched: torch.autograd.grad(
        value, list(inputs.values()), y, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )
    try:
        together = gradient(cotangents, True)
    except RuntimeError as error:
        assert "needlework::" in str(error) and "not implemented" in str(error)
        return
    apart = zip(*(gradient(y, False) for y in cotangents), strict=True)
    for name, got, want in zip(inputs, together, apart, strict=True):
        if got is not None:
            assert_close({name: got}, {name: torch.stack(want)}, "batched")


def test_forward_mode_passes_through_what_does_not_depend_on_it():
    """The angles of positions have no tangent, so a rotation has its derivative: it is linear."""
    x, t = torch.randn(2, 1, 3, 2, 8, dtype=torch.float64).unbind()
    turn = lambda x: needlework.layers.rope.Rope()(x, torch.arange(3)[None])
    assert_close({"t": torch.func.jvp(turn, (x,), (t,))[1]}, {"t": turn(t)}, "rope")


def test_streamed_attention_refuses_a_tangent_that_its_compiled_form_would_drop():
    q = torch.ones(1, 4, 2, 16)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="streamed attention: forward-mode"):
        streamed(q, forward_ad.make_dual(q, q), q, None, None, None)


def test_a_gradient_that_an_operator_does_not_have_is_refused_by_name():
    frequencies = torch.ones(4, requires_grad=True)
    angles = torch.ops.needlework.rope_angles(torch.arange(3)[None], frequencies)
    with pytest.raises(RuntimeError, match="needlework::rope_angles: no gradient is implemented"):
        angles.sum().backward()


def test_autograd_sees_that_a_step_has_changed_its_state():
    from needlework.ops.delta.step import delta_step

    with FakeTensorMode():
        q, v, state = torch.ones(2, 1, 4), torch.ones(2, 1, 3), torch.zeros(2, 1, 4, 3)
        before = state._version
        delta_step(*DeltaInputs(q, q, v), state=state, slots=None, scale=1.0, prediction="decayed", l2norm=False)
        assert (q._version, state._version) == (0, before + 1)
