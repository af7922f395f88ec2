"""A sequence over ranks is the sequence on one: the loss, every gradient, and nothing left behind."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from needlework.layers import Attention, Canon, GatedConv, Lucid, Rope, Softmax, SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.ranks import ranks
from needlework.testing.rows import chosen
from needlework.train.sequence_parallel import StatePassing

SIZES = Sizes(heads=2, key_dim=4, value_dim=6, attention_heads=4, kv_heads=2, head_dim=4, content_chunk=5)
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 4, "position": Rope()}
MIXERS = {name: named.make(SIZES) for name, named in CATALOG.items()} | {
    "gated-conv": GatedConv(),
    "rope": Attention(attend=Softmax(), **HEADS),
    "window": Attention(attend=Softmax(window=5), conv=Canon(), **HEADS),
    "lucid-window": Attention(attend=Lucid(window=9), **HEADS),
}
CASES = [(name, False) for name in MIXERS] + [("carve", True), ("ccq", True), ("atma", True), ("rope", True)]
# each state that is handed on: S, with content, with a covariance, with rows of the last token, with slots, of a convolution, of a
# product of steps; keys and values of a window, of all, with a solve, with a norm, with decays
QUICK = [
    (name, False)
    for name in (
        "qdelta",
        "ccq",
        "mamba2",
        "mamba3-mimo",
        "deltaproduct",
        "gated-conv",
        "differential",
        "fox",
        "window",
        "lucid-window",
    )
] + [("carve", True), ("atma", True), ("rope", True)]
BATCH, TOKENS, VOCABULARY = 2, 24, 31


def model(name, checkpointing=False, frozen=False):
    torch.manual_seed(0)
    mixer = MIXERS[name]
    config = NeedleworkConfig(
        vocab_size=VOCABULARY, hidden_size=8, layout="MM", mixers={"M": mixer}, mlp=SwiGLU(hidden=8), initializer_range=0.3
    )
    made = NeedleworkForCausalLM(config).double().train()
    with torch.no_grad():  # also where a branch starts at zero
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    if checkpointing:
        made.gradient_checkpointing_enable()
    if frozen:
        made.model.embed.requires_grad_(False)
        made.model.blocks[0].requires_grad_(False)
    return made


def batch():
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 14:], targets[1, ::3] = -100, -100  # most of a last part counts for nothing
    return tokens[:, :-1], targets


def gradients(model):
    return {key: p.grad for key, p in model.named_parameters() if p.requires_grad}


def whole(name, **settings):
    """One rank's loss and gradients."""
    one = model(name, **settings)
    tokens, targets = batch()
    loss = one(tokens, targets=targets).cross_entropy
    loss.backward()
    return loss.detach(), gradients(one)


def split(state_passing, name, **settings):
    """The same by the ranks of `state_passing`."""
    many = model(name, **settings)
    tokens, targets = (state_passing.segment(x) for x in batch())
    loss = many(tokens, targets=targets, state_passing=state_passing).cross_entropy
    loss.backward()
    state_passing.sum_gradients(many.parameters())
    loss = loss.detach()
    dist.all_reduce(loss, group=state_passing.group)
    return loss, gradients(many)


def unread(state_passing):
    """Two layers of a block that hands a state on and reads none: the next rank's zeros must still arrive."""
    x = torch.ones(2, 3, 4, requires_grad=True)
    y = x
    for layer in range(2):
        state_passing.receive(layer, y)
        y = state_passing.send(layer, 2 * y, (y.mean(1), torch.tensor([state_passing.rank, 7])))
    y.sum().backward()
    state_passing.sum_gradients([])
    return x.grad


def sharded():
    """Rows over one axis with the weights (FSDP2), tokens over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "sequence"))
    many, state_passing, row = model("ccq", checkpointing=True), StatePassing(mesh["sequence"]), mesh["shard"].get_local_rank()
    for module in (*many.model.blocks, many):
        fully_shard(module, mesh=mesh["shard"])
    for module in (*many.model.blocks, many):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    tokens, targets = (state_passing.segment(x[row : row + 1]) for x in batch())
    loss = many(tokens, targets=targets, state_passing=state_passing).cross_entropy
    loss.backward()
    state_passing.sum_gradients(many.parameters())
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss, {key: gradient.full_tensor() for key, gradient in gradients(many).items()}


def tensors():
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def main(world):
    rank, world, found = dist.get_rank(), int(world), {}
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("sequence",))
    if rank < world:
        for name, checkpointing in QUICK if world == 3 else CASES:
            found[name, checkpointing] = split(StatePassing(mesh), name, checkpointing=checkpointing)
        found["frozen"] = split(StatePassing(mesh), "carve", frozen=True)
        found["unread"] = unread(StatePassing(mesh))
        state_passing, counts = StatePassing(mesh), []
        for _ in range(6):
            split(state_passing, "window")
            counts.append(tensors())
        found["tensors"] = counts
        state_passing = StatePassing(mesh)
        with torch.no_grad():
            many = model("ccq").eval()
            tokens, targets = (state_passing.segment(x) for x in batch())
            found["evaluated"] = [many(tokens, targets=targets, state_passing=state_passing).cross_entropy for _ in range(2)]
        state_passing.sum_gradients([])
    found["sharded"] = sharded()
    axes = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    for name, wrong in {
        "axes": lambda: StatePassing(axes),
        "segments": lambda: StatePassing(axes["b"]).segment(torch.zeros(1, 25)),
    }.items():
        with pytest.raises(ValueError) as caught:
            wrong()
        found[name] = str(caught.value)
    return found


def same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=0)
    assert found[1].keys() == expected[1].keys()
    for key, gradient in expected[1].items():
        atol = 1e-10 * max(1, gradient.abs().max())
        torch.testing.assert_close(found[1][key], gradient, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def found(world):
    return ranks(4, main, str(world))


@pytest.mark.parametrize(
    "name, checkpointing",
    chosen(CASES, QUICK),
    ids=lambda x: x if isinstance(x, str) else "checkpointed" if x else "",
)
def test_a_split_sequence_has_the_whole_ones_loss_and_gradients(found, name, checkpointing, world):
    if (name, checkpointing) not in found[0]:
        pytest.skip("two ranks have it")
    expected = whole(name)
    for rank in range(world):
        same(found[rank][name, checkpointing], expected)


def test_weights_may_be_sharded_over_another_axis(found):
    for rank in range(4):
        same(found[rank]["sharded"], whole("ccq"))


def test_frozen_first_layers_leave_the_others_their_gradients(found, world):
    for rank in range(world):
        same(found[rank]["frozen"], whole("carve", frozen=True))


def test_a_state_that_no_block_reads_keeps_the_ranks_in_step(found, world):
    for rank in range(world):
        assert torch.equal(found[rank]["unread"], torch.full((2, 3, 4), 4.0))


def test_a_loss_without_gradients_needs_no_backward(found, world):
    expected = whole("ccq")[0]
    for again in range(2):
        total = sum(found[rank]["evaluated"][again] for rank in range(world))
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)


def test_nothing_is_kept_from_step_to_step(found, world):
    """One tensor that is kept a step makes five more in five steps. A count may have one that another thread is about to let go."""
    for rank in range(world):
        counts = found[rank]["tensors"]
        assert counts[-1] - counts[0] < len(counts) - 1


def test_what_cannot_be_split_is_refused(found):
    assert found[0]["segments"] == "sequence parallelism: 25 tokens do not make 2 equal segments"
    assert found[0]["axes"] == "sequence parallelism: the mesh has axes ('a', 'b'), expected the one that splits the sequence"
