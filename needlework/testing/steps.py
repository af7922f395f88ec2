"""A rule run by steps on a slot table, and what its definition says of that."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.testing.compare import leaves, like, tokens, whole


def by_steps(spec: OpSpec, inputs: dict[str, Tensor], R: int = 1) -> dict[str, Tensor]:
    """Outputs and final states of the rows as `recurrent` gives them, by steps of R tokens on a table in which slots are out of order,
    a padded row comes with every token, and one slot has no owner. Pages have rows for all tokens."""
    assert spec.step is not None, f"{spec.name} has no step"
    step, name = spec.step, spec.tokens[0]
    B, T = inputs[name].shape[:2]
    device = inputs[name].device
    rows = torch.arange(B + 1, device=device) % B  # the padded row brings live values, which must go nowhere
    slots = torch.arange(B + 1, 0, -1, device=device)
    slots[-1] = -1
    single = {n: x.float() for n, x in inputs.items()}
    empty, grown = (whole(spec.recurrent)(tokens(spec, single, lambda x, t=t: x[rows, :t]))[-1] for t in (0, T))
    parts = zip(leaves(empty), leaves(grown), _held_in(spec, inputs), strict=True)
    first = [x.to(kind) if x.shape == y.shape else torch.zeros_like(y, dtype=kind) for (_, x), (_, y), kind in parts]
    table = like(empty, iter([torch.cat([x, x[:1]]).contiguous() for x in first]))
    nobody = {field: x[0].clone() for field, x in leaves(table)}
    by_token = defaultdict(list)
    for t in range(0, T, R):
        own = slice(t, t + R) if R > 1 else t
        result = step(**tokens(spec, inputs, lambda x, own=own: x[rows, own].contiguous()), state=table, slots=slots)
        for field, x in leaves(result if isinstance(result, tuple) else (result,)):
            assert not x[-1].any(), "a padded row is not zero"
            by_token[field].append(x[:-1] if R > 1 else x[:-1, None])
    for field, x in leaves(table):
        assert torch.equal(x[0], nobody[field]), f"state {field}: a slot that no row owns has changed"
    names = [n for n, _ in leaves(spec.recurrent(**tokens(spec, single, lambda x: x[:, :1])))]
    values = dict(zip(names, (torch.cat(xs, 1) for xs in by_token.values()), strict=True))
    state = {f"state.{field}" if field else "state": x[slots[:-1]] for field, x in leaves(table)}
    return values | state


def by_definition(spec: OpSpec, dtype: torch.dtype, R: int, inputs: dict[str, Tensor]) -> tuple:
    """`recurrent` as steps have it: what lies in pages is rounded to dtype after every R tokens."""
    if not _grows(spec, inputs):
        return whole(spec.recurrent)(inputs)
    stored = {n: x.to(dtype if n in spec.half else torch.float32) for n, x in inputs.items()}
    kinds, state, parts = _held_in(spec, stored), None, []
    for t in range(0, inputs[spec.tokens[0]].shape[1], R):
        own = tokens(spec, inputs, lambda x, t=t: x[:, t : t + R])
        *values, state = result = spec.recurrent(**own, initial_state=state, output_final_state=True)
        state = like(state, iter([x.to(kind).to(x) for (_, x), kind in zip(leaves(state), kinds, strict=True)]))
        parts.append(values)
    kind: Any = type(result)
    return kind(*(torch.cat(column, 1) for column in zip(*parts, strict=True)), state)


def _held_in(spec: OpSpec, inputs: dict[str, Tensor]) -> list[torch.dtype]:
    """The dtypes of a state's tensors beside such inputs."""
    state = spec.chunk(**tokens(spec, inputs, lambda x: x[:, :1]), output_final_state=True)[-1]
    return [x.dtype for _, x in leaves(state)]


def _grows(spec: OpSpec, inputs: dict[str, Tensor]) -> bool:
    """Whether the state has pages."""
    none = whole(spec.recurrent)(tokens(spec, inputs, lambda x: x[:, :0]))[-1]
    return any(0 in x.shape for _, x in leaves(none))
