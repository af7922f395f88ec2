"""Every kind of layer in the engine: prompts in chunks, from a snapshot, and answers that make way and go on."""

import math
import random

import pytest
import torch

from needlework.layers import Attention, Softmax
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.serve.request import Request, Sampling
from needlework.testing.rows import chosen
from tests.layers.test_mixers import CONFIGS, DIM
from tests.models.test_table_cache import V

from .serving import Serving

EPS = torch.finfo(torch.float32).eps
ASKED = Sampling(temperature=0.0, logprobs=1)
HEAD = 70  # tokens that prompts begin with: a snapshot has 64 of them
QUICK = [
    "linear-plain", "gdn2 with its output gate", "deltaproduct", "comba, grouped", "rwkv-7", "ccq on gla-hedgehog", "mamba", "ssmax", "fox",
    "lucid path", "polar and a kda memory",
]  # fmt: skip
COMPUTED_AGAIN = ["carve of rank 2, decayed", "ccq on mamba-2, two groups", "fox in a window", "path that forgets"]
SNAPSHOTS = ["carve-ccq", "hedgehog", "ccq on mamba-2, two groups", "mamba3", "fox in a window", "lucid beta", "differential"]
SHARED = [kind for kind, mixer in CONFIGS.items() if not mixer.build(DIM).held(torch.float64).rewritten]


def model(kind):
    """A layer of the kind, and one whose pages run short: what has slots alone is never in another's way."""
    torch.manual_seed(0)
    mixers = {"X": CONFIGS[kind], "S": Attention(heads=2, kv_heads=1, head_dim=8, attend=Softmax())}
    made = NeedleworkForCausalLM(
        NeedleworkConfig(vocab_size=V, hidden_size=DIM, layout="XS", mixers=mixers, initializer_range=0.2)
    )
    with torch.no_grad():
        for p in made.parameters():  # away from starts at zero, where a branch could hide
            p.add_(0.05 * torch.randn_like(p))
    return made.double().eval()


def requests(n, answer):
    rng = random.Random(5)
    head = tuple(rng.randrange(V) for _ in range(HEAD))
    return [
        Request(id=str(i), prompt=(*head, *(rng.randrange(V) for _ in range(20))), max_tokens=answer, sampling=ASKED)
        for i in range(n)
    ]


def right(model, request, events):
    """Tokens and log p's are those of the whole sequence at once. Logits of float64 are rounded to float32 once, [V]: |x| <= M. Their
    log-softmax in float32 is then off by M/2 of them, M/2 and V/2 of their sum, M of two differences, in units of eps."""
    answer = [event.token for event in events]
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt, *answer]])).logits[0, len(request.prompt) - 1 : -1]
    exact = logits.log_softmax(-1)
    M = max(float(logits.abs().max()), float(exact.abs().max()))
    budget = EPS * (2 * M + V / 2)
    assert answer == logits.float().argmax(-1).tolist()
    for event, row in zip(events, exact, strict=True):
        assert math.isclose(event.logprob, row[event.token], rel_tol=0, abs_tol=budget)


def make_way(kind, host_bytes):
    """Four requests on pages of which all need more than there are; one before them leaves the snapshot that they begin from."""
    served, rewrites = model(kind), kind not in SHARED
    first, *others = requests(5, 30)
    options = {"batch": 4, "snapshots": 0 if rewrites else 2, "budget": 64, "full": 1.3, "host_bytes": host_bytes}
    with Serving(served, **options) as serving:
        found = [list(serving.engine.add(first))]
        found += [list(stream) for stream in serving.engine.add_all(others)]
        scheduler, stats = serving.scheduler, serving.engine.stats()
        assert scheduler.resumed and scheduler.parked == scheduler.unparked
        assert bool(scheduler.parked) == bool(host_bytes)
        assert rewrites or stats.prefix_tokens
        assert serving.all_is_back()
    for request, events in zip([first, *others], found, strict=True):
        right(served, request, events)


@pytest.mark.parametrize("kind", chosen(CONFIGS, QUICK))
def test_chunks_snapshots_and_answers_that_were_parked_give_the_whole_sequence(kind):
    make_way(kind, 1 << 20)


@pytest.mark.parametrize("kind", chosen(CONFIGS, COMPUTED_AGAIN))
def test_chunks_snapshots_and_answers_that_are_computed_again_give_the_whole_sequence(kind):
    make_way(kind, 0)


@pytest.mark.parametrize("kind", chosen(SHARED, SNAPSHOTS))
def test_a_prompt_from_a_snapshot_is_the_prompt_from_its_beginning_bit_for_bit(kind):
    """Both read the same chunks, each alone in its step."""
    served, asked, found = model(kind), requests(2, 6), []
    for snapshots, hit in ((0, 0), (2, 64)):
        with Serving(served, snapshots=snapshots, budget=64) as serving:
            found.append([list(serving.engine.add(request)) for request in asked])
            assert serving.engine.stats().prefix_tokens == hit
    assert found[0] == found[1]
