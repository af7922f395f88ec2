"""The battery's checks of operators: torch.compile takes a call whole, torch.library finds nothing wrong with what it reaches."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from needlework.ops.api import OpSpec
from needlework.testing.compare import assert_close, differentiate, leaves, make, outputs


def compiles_without_a_graph_break(spec: OpSpec) -> None:
    """torch.compile(fullgraph=True), forward and backward, plain and packed."""
    torch._dynamo.reset()
    for settings in ({}, {"cu_seqlens": torch.tensor([0, 5, 21])}):
        inputs = make(spec, 1 if settings else 2, 21)
        call = lambda inputs, settings=settings: outputs(spec.chunk(**inputs, **settings))
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        values = lambda f: differentiate(lambda x: tuple(f(x).values()), inputs)  # noqa: B023
        got, want = values(compiled), values(call)
        assert_close(got[0], want[0], "compiled")
        assert_close(got[1], want[1], "compiled")


def custom_ops_pass_opcheck(spec: OpSpec) -> None:
    """Schema, fake and autograd registration of every custom op that a call reaches."""
    for settings in ({}, {"cu_seqlens": torch.tensor([0, 5, 5, 21])}):
        with record_custom_ops() as calls:
            inputs = {n: x.requires_grad_() for n, x in make(spec, 1 if settings else 2, 21).items()}
            result = spec.chunk(**inputs, output_final_state=True, **settings)
            total: Any = sum(x.sum() for _, x in leaves(result) if x.requires_grad)
            total.backward()
        assert calls or "no custom op" in spec.skip, f"{spec.name}: no custom op was called"
        for op, args, kwargs in calls.values():
            args = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args)
            torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
            if not op._name.endswith("_bwd"):
                torch.library.opcheck(op, args, kwargs, test_utils=("test_autograd_registration",))


@contextlib.contextmanager
def record_custom_ops() -> Iterator[dict]:
    """The last call of each, by name, with copies of what it was given: what has changed in place may not change again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "needlework":
                calls[func._name] = (func, *tree_map_only(Tensor, torch.clone, (args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield calls
