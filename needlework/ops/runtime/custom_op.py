"""Functions as operators of torch.library, `needlework::<name>`, registered one by one.

torch.library.custom_op does the same, and more that is not needed here: it imports torch._dynamo at the first call, which takes
as long as compiling all kernels of that call, and compares every result's memory with every argument's at each one. And an
operator of torch.library drops the tangents of forward-mode differentiation: its derivative is zero. Here it raises.

A function here takes and returns NamedTuples of tensors where it likes: the operator has their fields one by one (`signature.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import mutated_args_kwargs
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from needlework.ops.runtime.each import every
from needlework.ops.runtime.signature import Signature


@dataclass
class Formula:
    """Of an operator's gradient (`differentiable`)."""

    backward: Callable
    save: Callable | None = None
    forward: OpOverload | None = None  # what is called in the operator's place; None: itself


_library = torch.library.Library("needlework", "FRAGMENT")
_formulas: dict[OpOverload, Formula] = {}
_signatures: dict[OpOverload, Signature] = {}


def operator(function: Callable, around: Callable[[Callable], Callable] | None = None) -> OpOverload:
    """An operator on any device that changes nothing it is given and returns nothing that shares its memory.

    Its schema is that of the annotations. `fake` adds what it returns, `differentiable` its gradient: until then asking for
    one raises. `around`: what is made of the function as torch.library calls it, with tensors and numbers one by one.
    """
    return _operator(function, (), around)


def backward_operator(function: Callable, around: Callable[[Callable], Callable] | None = None) -> OpOverload:
    """An operator that computes gradients, and has none itself: a second derivative raises."""
    made = operator(function, around)
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


def differentiable(op: OpOverload, backward: Callable, save: Callable | None = None, forward: OpOverload | None = None) -> None:
    """The gradient of `op`: backward(ctx, *gradients), from what save(ctx, inputs, output) has kept.

    forward: an operator of the same arguments that is called in op's place where a backward will follow. Its first results are op's, what
    the backward takes comes after them, and its gradient is the same. save keeps inputs too: by them autograd sees a second derivative,
    which raises.
    Gradients are those of tensors one by one; save takes arguments and results as the operator's function has them, with an empty
    vector where a result is None.
    """
    made = forward or op
    signature = _signatures[made]

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        assert save is not None
        results = signature.named_results(output) if signature.several else output
        save(ctx, signature.named(inputs), results)

    for one in {op, made}:
        formula = _formulas[one]
        formula.backward, formula.save = backward, save if save is None or signature.plain else keep
        formula.forward = None if one is made else made


def _operator(
    function: Callable, changes: tuple[str, ...], around: Callable[[Callable], Callable] | None = None
) -> OpOverload:  # fmt: skip
    name, signature = function.__name__, Signature(function)
    function = function if signature.plain else signature.operator(function)
    function = function if around is None else around(function)
    schema = torch.library.infer_schema(function, mutates_args=signature.fields(changes))
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(torch.ops.needlework, name).default
    _signatures[op] = signature
    _formulas[op] = Formula(_refusal(op, "no gradient is implemented"))
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
    reverse = _function(op, _formulas[op]).apply

    def differentiate(keyset, *args):
        refuse_tangents(op.name(), args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if torch._C._are_functorch_transforms_active():
                _raise(op.name(), "reverse mode by function transforms (torch.func.grad, vjp, jacrev)")
            return reverse(*args, keyset)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return differentiate


def _function(op: OpOverload, formula: Formula) -> type[torch.autograd.Function]:
    """The operator with its formula. PyTorch's own (torch._library.autograd) fills in arguments that have defaults, which ours have not, and
    takes lists of tensors apart anywhere: of a dozen arguments that costs the host as much as several launches. Here results alone may be a
    list; a list that is given has no gradient."""
    count = len(op._schema.returns)
    listed = [isinstance(x.type, torch.ListType) for x in op._schema.returns] == [True]

    def forward(ctx, *args):
        *args, keyset = args
        with torch._C._AutoDispatchBelowAutograd():
            if formula.forward is None:
                results = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
            else:
                results = formula.forward(*args)
            if formula.save is not None:
                formula.save(ctx, args, results)
        if formula.forward is not None:
            return results[0] if count == 1 else results[:count]
        return tuple(results) if listed else results

    def backward(ctx, *gradients):
        found = formula.backward(ctx, *([list(gradients)] if listed else gradients))
        return *((found,) if isinstance(found, Tensor) else found), None

    name, methods = op._schema.name.split("::")[1], {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def refuse_tangents(name: str, arguments: tuple) -> None:
    """Raise NotImplementedError where a tensor among a function's arguments has a tangent, which it would drop."""
    if forward_ad._current_level < 0:  # as unpack_dual asks for every tensor
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in every(Tensor, arguments)):
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
