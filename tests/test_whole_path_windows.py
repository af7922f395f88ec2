"""Which keys a query sees, read off the weights: every query is zero, so all keys that it sees weigh alike, and value j is axis j."""

import pytest
import torch

from needlework.layers import Lucid, Polar, Softmax
from needlework.layers.config import Width
from needlework.layers.differential import Differential
from needlework.ops.attention.fused import oldest

T, D = 12, 64  # as many keys as stand apart from one another: what LUCID solves away is e^-8 of a value
RULES = {
    "softmax": lambda W: Softmax(window=W),
    "differential": lambda W: Differential(window=W),
    "polar": lambda W: Polar(window=W),
    "lucid": lambda W: Lucid(window=W),
    "lucid-global": lambda W: Lucid(window=W, solve="global"),
    "lucid-qk": lambda W: Lucid(window=W, precondition="qk"),
}
SPLITS = {"whole": (12,), "token by token": (1,) * 12, "prefill and steps": (5, 1, 1, 1, 4), "long pieces": (7, 5)}


def weights(attend, pieces, cu_seqlens=None):
    """[T T] of each query the weight of each value, and of none."""
    q, k = torch.zeros(1, T, 1, D), torch.eye(T, D)[None, :, None]
    v = torch.eye(T, D)[None, :, None]
    state, found = None, []
    for part in torch.arange(T).split(pieces):
        o, _, state = attend(
            torch.zeros(1, len(part), D), q[:, part], k[:, part], v[:, part],
            initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        found.append(o[0, :, 0, :T])
    return torch.cat(found)


def seen_by_hand(window, ends=(T,)):
    """Query i sees key j of its document if j is none of the future and at most window − 1 tokens back."""
    document = [sum(i >= end for end in ends) for i in range(T)]
    return torch.tensor(
        [[document[i] == document[j] and 0 <= i - j and i - j <= window - 1 for j in range(T)] for i in range(T)]
    )


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("window", (1, 3, 5, 11, 12, 40))
@pytest.mark.parametrize("rule", RULES)
def test_a_query_sees_the_newest_keys_of_its_window_and_no_other(rule, window, split):
    torch.manual_seed(0)
    attend = RULES[rule](window).build(Width(D, 1, 1, D, D, False))
    with torch.no_grad():
        found = weights(attend, list(SPLITS[split]))
    seen = seen_by_hand(window)
    assert ((found.abs() > 0.02) == seen).all()
    if rule == "softmax":
        torch.testing.assert_close(found, seen / seen.sum(1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("window", (2, 4, 40))
@pytest.mark.parametrize("rule", RULES)
def test_a_packed_query_sees_its_own_document_in_its_window(rule, window):
    torch.manual_seed(0)
    attend = RULES[rule](window).build(Width(D, 1, 1, D, D, False))
    with torch.no_grad():
        found = weights(attend, [T], cu_seqlens=torch.tensor([0, 3, 4, T]))
    assert ((found.abs() > 0.02) == seen_by_hand(window, (3, 4, T))).all()


@pytest.mark.parametrize("window", (1, 2, 5, 12, None))
@pytest.mark.parametrize("ends", ((T,), (3, 4, T)))
def test_the_bound_that_streamed_attention_takes_is_the_oldest_key_of_the_window(window, ends):
    bound = oldest(torch.zeros(1, T, 1, D), None if ends == (T,) else torch.tensor([0, *ends]), window)
    assert bound.tolist() == seen_by_hand(window or T, ends).int().argmax(1).tolist()
