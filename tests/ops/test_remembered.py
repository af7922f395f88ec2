"""What follows from cu_seqlens is found once for a tensor, as a GPU's is, and anew once PyTorch has changed it."""

import gc
import weakref

import pytest
import torch

from needlework.ops.common import remembered
from needlework.ops.common.packing import check_cu_seqlens


@pytest.fixture
def lasting(monkeypatch):
    """As if on a GPU; what was found before is forgotten."""
    monkeypatch.setattr(remembered, "_lasts", lambda x: type(x) is torch.Tensor and not x.is_inference())
    monkeypatch.setattr(remembered, "_known", type(remembered._known)())


def counted(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (reads.append(x), tolist(x))[1])
    return reads


def test_a_tensor_is_read_once_until_it_changes(lasting, monkeypatch):
    cu_seqlens, reads = torch.tensor([0, 3, 7]), counted(monkeypatch)
    assert check_cu_seqlens(cu_seqlens, 1, 7) == check_cu_seqlens(cu_seqlens, 1, 7) == [0, 3, 7] and len(reads) == 1
    cu_seqlens[1] = 5
    assert check_cu_seqlens(cu_seqlens, 1, 7) == [0, 5, 7] and len(reads) == 2
    cu_seqlens[1] = 9
    for _ in range(2):
        with pytest.raises(ValueError, match="expected to rise from 0 to T = 7"):
            check_cu_seqlens(cu_seqlens, 1, 7)


def test_another_length_is_another_question(lasting):
    cu_seqlens = torch.tensor([0, 3, 7])
    assert check_cu_seqlens(cu_seqlens, 1, 7) and check_cu_seqlens(cu_seqlens, 1, 9, padded=True)
    with pytest.raises(ValueError, match="to T = 9"):
        check_cu_seqlens(cu_seqlens, 1, 9)


def test_equal_tensors_are_two_and_what_was_found_goes_with_its_tensor(lasting):
    one, other = torch.tensor([0, 3, 7]), torch.tensor([0, 3, 7])
    double = remembered.remembered(lambda x: 2 * x)
    remembered.remember(one)
    found = weakref.ref(double(one))
    assert double(one) is found() and double(other) is not double(other)
    del one
    gc.collect()
    assert found() is None and not len(remembered._known)


def test_nothing_is_kept_of_a_cpu_or_without_a_version(monkeypatch):
    known = type(remembered._known)()
    monkeypatch.setattr(remembered, "_known", known)
    check_cu_seqlens(torch.tensor([0, 7]), 1, 7)
    monkeypatch.setattr(remembered, "_lasts", lambda x: not x.is_inference())
    with torch.inference_mode():
        check_cu_seqlens(torch.tensor([0, 7]), 1, 7)
    assert not len(known)
