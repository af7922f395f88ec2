"""What a step descends on, against the formula written out: each term has the share of the gradient that its weight says."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from needlework.train import Piece, World, gradient
from needlework.train.losses import backward

from .tiny import Tiny, batch


def both(model, piece):
    logits = model(piece.input_ids)
    entropy = F.cross_entropy(logits.flatten(0, 1), piece.labels.flatten(), ignore_index=-100, reduction="sum")
    size = logits.square().mean()
    return SimpleNamespace(cross_entropy=entropy, auxiliary=0.3 * size, share=0.8, parts={"size": size.detach()})


def pieces(*indices):
    found = []
    for index in indices:
        b = batch(index)
        b.labels[:, : index % 4] = -100
        found.append(Piece(b.input_ids, b.labels))
    return found


@pytest.mark.parametrize("parts", [1, 3])
def test_the_terms_are_weighted_as_the_formula_says(parts):
    """One of `parts` ranks; the others' addends are theirs to add."""
    ours, literal = Tiny(dropout=0.0).double(), Tiny(dropout=0.0).double()
    read = pieces(1, 2)
    counted = sum(int((p.labels != -100).sum()) for p in read) + 7  # seven on other ranks
    found = backward(ours, both, read, counted, parts, None)

    terms = [both(literal, piece) for piece in read]
    total = sum(0.8 * t.cross_entropy / counted + t.auxiliary / (2 * parts) for t in terms)
    total.backward()
    for a, b in zip(ours.parameters(), literal.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)
    assert found.cross_entropy.tolist() == pytest.approx([t.cross_entropy.item() / counted for t in terms], rel=1e-12)
    assert found.parts["size"].item() == pytest.approx(sum(t.parts["size"].item() for t in terms) / (2 * parts), rel=1e-12)
    assert found.parts["auxiliary"].item() == pytest.approx(0.3 * found.parts["size"].item(), rel=1e-12)
    assert found.cross_entropy.dtype == torch.float64


def test_the_norm_is_that_of_all_gradients_as_one_vector():
    model, world = Tiny().double(), World()
    backward(model, both, pieces(1), 20, 1, None)
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert gradient.squared_norm(model, world).sqrt().item() == pytest.approx(whole.norm().item(), rel=1e-12)
    assert gradient.norms(model, world) == pytest.approx(
        {n: p.grad.norm().item() for n, p in model.named_parameters()}, rel=1e-12
    )
    gradient.clip_(model.parameters(), whole.norm().item(), 0.1 * whole.norm().item())
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(after, 0.1 * whole, rtol=1e-5, atol=0)
    gradient.clip_(model.parameters(), after.norm().item(), 1e9)
    assert torch.equal(after, torch.cat([p.grad.flatten() for p in model.parameters()]))
