"""Packed sequences: which document a token is in, and where."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from needlework.ops.common.packing import document_positions


@pytest.mark.parametrize("ends", [(0, 64), (0, 5, 64), (0, 5, 5, 6), (0, 0, 3), (0, 4)])
def test_every_token_has_its_document_and_its_place_there(ends):
    """Of no tokens too; tokens behind the last end are of one document more."""
    cu_seqlens, T = torch.tensor(ends), ends[-1] + 3
    document, position = document_positions(cu_seqlens, T)
    expected = [
        (n, t - start) for n, (start, end) in enumerate(zip(ends, (*ends[1:], T), strict=True)) for t in range(start, end)
    ]
    assert list(zip(document.tolist(), position.tolist(), strict=True)) == expected


def test_compiled_code_searches_no_view_with_an_offset():
    """Inductor of torch 2.11 compiles searchsorted for GPUs as if a view of its boundaries began where its storage does."""
    traced = make_fx(lambda ends: document_positions(ends, 9))(torch.tensor([0, 4, 9]))
    (search,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.searchsorted.Tensor)
    assert search.args[0].op == "placeholder"
