"""Functions as operators of torch.library, `needlework::<name>`, registered one by one.

torch.library.custom_op does the same, and more that is not needed here: it imports torch._dynamo at the first call, which takes
as long as compiling all kernels of that call, and compares every result's memory with every argument's at each one.
"""

from collections.abc import Callable

import torch
from torch._ops import OpOverload

_library = torch.library.Library("needlework", "FRAGMENT")


def operator(function: Callable) -> OpOverload:
    """An operator on any device that changes nothing it is given and returns nothing that shares its memory.

    Its schema is that of the annotations. torch.library.register_fake and register_autograd add what it needs besides.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.needlework, name).default


def backward_operator(function: Callable) -> OpOverload:
    """An operator that computes gradients, and has none itself: a second derivative raises."""
    made = operator(function)

    def refuse(ctx, *gradients):
        raise RuntimeError(f"{made.name()}: its gradient was asked for, and second derivatives are not there")

    torch.library.register_autograd(made, refuse)
    return made
