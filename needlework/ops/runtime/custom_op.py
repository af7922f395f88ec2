"""Functions as operators of torch.library, `needlework::<name>`, registered one by one.

torch.library.custom_op does the same, and more that is not needed here: it imports torch._dynamo at the first call, which takes
as long as compiling all kernels of that call, and compares every result's memory with every argument's at each one. And an
operator of torch.library drops the tangents of forward-mode differentiation: its derivative is zero. Here it raises.

A function here takes and returns NamedTuples of tensors where it likes: the operator has their fields one by one (`signature.py`).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch._library.utils import mutated_args_kwargs
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from needlework.ops.runtime.signature import Signature

_library = torch.library.Library("needlework", "FRAGMENT")
_formulas: dict[OpOverload, Info] = {}
_signatures: dict[OpOverload, Signature] = {}


def operator(function: Callable) -> OpOverload:
    """An operator on any device that changes nothing it is given and returns nothing that shares its memory.

    Its schema is that of the annotations. `fake` adds what it returns, `differentiable` its gradient: until then asking for
    one raises.
    """
    return _operator(function, ())


def backward_operator(function: Callable) -> OpOverload:
    """An operator that computes gradients, and has none itself: a second derivative raises."""
    made = operator(function)
    differentiable(made, _refusal(made, "second derivatives are not implemented"))
    return made


def step_operator(*changes: str) -> Callable[[Callable], OpOverload]:
    """An operator that changes the named arguments, "x", or fields of them, "x.y", in place, and has no gradient."""
    return lambda function: _operator(function, changes)


def fake(op: OpOverload) -> Callable[[Callable], Callable]:
    """torch.library.register_fake of a function that takes and returns what the operator's own does."""

    def register(function: Callable) -> Callable:
        torch.library.register_fake(op, _signatures[op].fake(function))
        return function

    return register


def differentiable(op: OpOverload, backward: Callable, save: Callable | None = None) -> None:
    """The gradient of `op`: backward(ctx, *gradients), from what save(ctx, inputs, output) has kept.

    Gradients are those of tensors one by one; save takes arguments and results as the operator's function has them, with an empty
    vector where a result is None.
    """
    signature = _signatures[op]

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        assert save is not None
        results = signature.named_results(output) if signature.several else output
        save(ctx, signature.named(inputs), results)

    _formulas[op]._backward_fn = backward
    _formulas[op]._setup_context_fn = save if save is None or signature.plain else keep


def _operator(function: Callable, changes: tuple[str, ...]) -> OpOverload:
    name, signature = function.__name__, Signature(function)
    function = function if signature.plain else signature.operator(function)
    schema = torch.library.infer_schema(function, mutates_args=signature.fields(changes))
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(torch.ops.needlework, name).default
    _signatures[op] = signature
    _formulas[op] = Info(_refusal(op, "no gradient is implemented"), None)
    _library.impl(name, _reverse_mode_only(op), "Autograd", with_keyset=True)
    if changes:
        _library.impl(name, _counted(op), "ADInplaceOrView", with_keyset=True)
    return op


def _refusal(op: OpOverload, reason: str) -> Callable:
    def refuse(ctx, *gradients):
        raise RuntimeError(f"{op.name()}: {reason}")

    return refuse


def _reverse_mode_only(op: OpOverload) -> Callable:
    """The kernel that autograd calls: it raises where PyTorch would drop a derivative, or would not name the operator."""
    reverse = make_autograd_impl(_listed(op), _formulas[op])

    def differentiate(keyset, *args):
        tensors = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(x, Tensor)]
        refuse_tangents(op.name(), *tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            if torch._C._are_functorch_transforms_active():
                _raise(op.name(), "reverse mode by function transforms (torch.func.grad, vjp, jacrev)")
            return reverse(keyset, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return differentiate


def _listed(op: OpOverload) -> Any:
    """What PyTorch's autograd asks of an operator. It asks for the schema's arguments twice for each of them at every call, and a schema
    makes their list anew each time: of a dozen arguments that takes the host as long as several launches."""
    schema = SimpleNamespace(arguments=list(op._schema.arguments), returns=list(op._schema.returns))
    names = {name: getattr(op, name) for name in ("_namespace", "_opname", "_overloadname", "tags", "redispatch")}
    return SimpleNamespace(_schema=schema, **names)


def refuse_tangents(name: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError where a tensor has a tangent, for a function that would drop it."""
    if forward_ad._current_level < 0:  # as unpack_dual asks for every tensor
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        _raise(name, "forward-mode differentiation (torch.func.jvp, jacfwd, torch.autograd.forward_ad)")


def _raise(name: str, mode: str) -> None:
    raise NotImplementedError(
        f"{name}: {mode} is not implemented; backward() and torch.autograd.grad are, once. impl='reference' "
        "(NEEDLEWORK_IMPL=reference) computes by PyTorch's own operators, which have every mode"
    )


def _counted(op: OpOverload) -> Callable:
    """Autograd sees by a tensor's version that it has changed since it was kept for a backward."""
    changed, _ = mutated_args_kwargs(op._schema)

    def count(keyset, *args):
        increment_version([args[i] for i in changed if args[i] is not None])
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    return count
