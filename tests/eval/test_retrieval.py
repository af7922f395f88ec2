"""Retrieval counts what it says it counts, on models whose answers are known."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from needlework.eval import retrieval

X = -100


class Says(nn.Module):
    """A model that predicts a fixed token at every position, whatever it reads."""

    def __init__(self, says):
        super().__init__()
        self.says = torch.tensor(says)

    def forward(self, input_ids):
        assert not self.training and not torch.is_grad_enabled()
        return SimpleNamespace(logits=F.one_hot(self.says.expand(len(input_ids), -1), 10).float())


def episodes(targets):
    targets = torch.tensor(targets)
    return SimpleNamespace(input_ids=torch.zeros_like(targets), targets=targets)


def test_accuracy_counts_tokens_and_exact_counts_values():
    model = Says([1, 2, 3, 4, 5, 6])
    # Three values: 2 3 right; 5 9 half right; 1 2 7 two thirds right.
    found = retrieval(model, episodes([[X, 2, 3, X, 5, 9], [1, 2, 7, X, X, X]]))
    assert found[:4] == (5 / 7, 1 / 3, 7, 3)
    # of ten logits one is 1 and the others 0: a right token has ln(e + 9) − 1 nats, a wrong one ln(e + 9)
    assert found.nll == pytest.approx(math.log(math.e + 9) - 5 / 7, rel=1e-6)


def test_a_value_ends_with_its_row():
    found = retrieval(Says([1, 2, 3]), episodes([[X, X, 3], [1, X, X], [9, X, X]]))
    assert found[:4] == (2 / 3, 2 / 3, 3, 3)


def test_an_echo_retrieves_what_it_reads_and_nothing_else():
    echo = lambda input_ids: F.one_hot(input_ids, 10).float()
    ids = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    assert retrieval(echo, SimpleNamespace(input_ids=ids, targets=ids))[:2] == (1, 1)
    assert retrieval(echo, SimpleNamespace(input_ids=ids, targets=(ids + 1) % 10))[:2] == (0, 0)


def test_the_batch_size_changes_nothing():
    rows = torch.randint(10, (7, 12), generator=torch.Generator().manual_seed(0))
    targets = torch.where(rows > 6, X, rows)
    model = Says(list(range(10)) + [3, 3])
    found = {retrieval(model, SimpleNamespace(input_ids=rows, targets=targets), batch_size=b) for b in (1, 3, 7, 100)}
    assert len(found) == 1


def test_the_model_goes_back_to_training():
    model = Says([1]).train()
    retrieval(model, episodes([[1]]))
    assert model.training


def test_nothing_scored_is_an_error():
    with pytest.raises(ValueError, match="score no position"):
        retrieval(Says([1, 2]), episodes([[X, X]]))


def test_targets_of_another_shape_are_an_error_that_names_both():
    wrong = SimpleNamespace(input_ids=torch.zeros(2, 4, dtype=torch.long), targets=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"targets \[2, 5\].*input_ids \[2, 4\]"):
        retrieval(Says([1] * 4), wrong)


def test_logits_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"logits must be \[B T vocabulary\]"):
        retrieval(lambda input_ids: torch.zeros(len(input_ids), 10), episodes([[1, 2]]))
