"""Heads over ranks: the loss and every gradient of one rank, beside FSDP2 too, and saved under the same names and shapes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from needlework.layers import (
    CCQ,
    Attention,
    Canon,
    Carve,
    Delta,
    GatedConv,
    GatedNorm,
    Lucid,
    Mamba2,
    Mamba3,
    Memory,
    Polar,
    Recurrent,
    Rope,
    ScalarGate,
    ShortConv,
    Softmax,
    SquaredReLU,
    SwiGLU,
)
from needlework.layers.catalog import CATALOG, Sizes
from needlework.layers.distract import Distractor
from needlework.layers.objective import Objective
from needlework.layers.regularise import Weak
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.ranks import ranks
from needlework.testing.rows import chosen
from needlework.train.muon import Muon
from needlework.train.tensor import _share, split_heads

SIZES = Sizes(heads=2, key_dim=4, value_dim=6, attention_heads=4, kv_heads=2, head_dim=4, content_chunk=5)
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 4}
WHOLE = ("mamba", "mamba2", "retnet", "alibi")  # no heads; one key head; heads that are not alike
MIXERS = {name: named.make(SIZES) for name, named in CATALOG.items() if name not in WHOLE} | {
    "mamba-2 of two groups": Recurrent(
        heads=2, value_heads=4, key_dim=4, value_dim=6, write=Mamba2(), conv=ShortConv(bias=True), norm=GatedNorm()
    ),
    "grouped values": Recurrent(
        heads=2, value_heads=4, key_dim=4, value_dim=6, write=Delta(gate=ScalarGate()), read=CCQ(aligned=True)
    ),
    "two rows a token": Recurrent(heads=2, key_dim=4, value_dim=6, write=Carve(write_rank=2, content_chunk=5)),
    "lucid, beta": Attention(attend=Lucid(precondition="beta"), position=Rope(), **HEADS),
    "polar, biased": Attention(attend=Polar(), conv=Canon(), bias=True, output_gate=True, memory=Memory(), **HEADS),
    "mamba3 with groups": Mamba3(heads=4, key_dim=4, value_dim=6, groups=2, rank=2, output_norm=True),
    "gated convolution": GatedConv(channels=6),
    "gated convolution, published": GatedConv(bias=False, published_init=True),
}
MLPS = {"swiglu": SwiGLU(hidden=12, bias=True), "squared_relu": SquaredReLU(hidden=12)}
CASES = [(mixer, "swiglu") for mixer in MIXERS] + [("rope", "squared_relu")]
# whose parts are parts of others too
COVERED = (
    "linear", "gla", "deltanet", "gated-deltanet", "hedgehog", "longhorn", "comba", "carve", "ccq", "softmax", "ssmax", "lucid", "polar", "mamba3",
    "gated convolution",
)  # fmt: skip
QUICK = [(mixer, mlp) for mixer, mlp in CASES if mixer not in COVERED]
MIXERS["rope"] = Attention(attend=Softmax(), position=Rope(), **HEADS)
MIXERS |= {
    "one key head": Attention(heads=4, kv_heads=1, head_dim=4, attend=Softmax()),
    "odd convolution": GatedConv(channels=7),
    **{name: CATALOG[name].make(SIZES) for name in WHOLE},
}
MLPS["odd"] = SwiGLU(hidden=13)
OBJECTIVE = Objective(regulariser=Weak(), distractor=Distractor(), regulariser_weight=0.3, distractor_weight=0.7)
VOCABULARY = 31


def model(layout, mlp="swiglu"):
    """One layer of each mixer that is named in `layout`, in float64."""
    torch.manual_seed(0)
    letters = {chr(ord("A") + i): MIXERS[name] for i, name in enumerate(layout)}
    made = NeedleworkForCausalLM(
        NeedleworkConfig(
            vocab_size=VOCABULARY, hidden_size=8, layout="".join(letters), mixers=letters, mlp=MLPS[mlp], initializer_range=0.3
        )
    )
    made = made.double().train()
    with torch.no_grad():  # also where a branch starts at zero
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


def batch():
    tokens = torch.randint(VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def passed(made, rows=slice(None), objective=None):
    """The loss and every gradient."""
    tokens, targets = batch()
    torch.manual_seed(2)  # what an objective draws
    found = made(tokens[rows], targets=targets[rows], objective=objective)
    loss = found.cross_entropy if objective is None else found.cross_entropy + found.auxiliary
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in made.named_parameters()}


def split(mesh, *layout, objective=None, **settings):
    made = model(layout, **settings)
    shapes = {key: p.shape for key, p in made.named_parameters()}
    split_heads(made, mesh)
    assert {key: p.shape for key, p in made.named_parameters()} == shapes
    loss, gradients = passed(made, objective=objective)
    kept = {key: p.to_local().shape for key, p in made.model.blocks.named_parameters() if isinstance(p, DTensor)}
    return loss, {key: whole(g) for key, g in gradients.items()}, kept


HYBRID = ("carve", "atma", "ccq")


def steps(made, rows=slice(None)):
    """Two steps of Muon; the losses."""
    matrices = [p for name, p in made.named_parameters() if p.ndim == 2 and "_proj" in name]
    muon, losses = Muon(matrices, lr=0.02), []
    for _ in range(2):
        losses.append(passed(made, rows)[0])
        muon.step()
        made.zero_grad()
    return torch.stack(losses)


def both(directory):
    """Heads over one axis of a mesh, FSDP2 over the other: losses, gradients, weights after Muon, and a checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    made = model(HYBRID)
    split_heads(made, mesh["tensor"])
    for module in (*made.model.blocks, made):
        fully_shard(module, mesh=mesh["shard"])
    for module in (*made.model.blocks, made):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    here = mesh["shard"].get_local_rank()
    rows = slice(2 * here, 2 * here + 2)
    loss, gradients = passed(made, rows)
    dist.all_reduce(loss, group=mesh["shard"].get_group())
    gradients = {key: whole(g) for key, g in gradients.items()}
    made.zero_grad()
    losses = steps(made, rows)
    dist.all_reduce(losses, group=mesh["shard"].get_group())
    dcp.save(made.state_dict(), checkpoint_id=f"{directory}/checkpoint")
    return loss, gradients, losses, {key: whole(x) for key, x in made.state_dict().items()}


REFUSED = {
    "recurrent has heads = 2, which 3 ranks cannot share evenly": (3, ["linear"], "swiglu"),
    "attention has heads = 4, which 3 ranks cannot share evenly": (3, ["rope"], "swiglu"),
    "attention has kv_heads = 1, which 2 ranks cannot share evenly": (2, ["linear", "one key head"], "swiglu"),
    "recurrent has heads = 1, which 2 ranks cannot share evenly": (2, ["mamba2"], "swiglu"),
    "mamba has no heads that 2 ranks could share": (2, ["mamba"], "swiglu"),
    "swiglu has hidden = 13, which 2 ranks cannot share evenly": (2, ["linear"], "odd"),
    **{
        f"{mixer} has a part {part}, whose heads differ by their number: 2 ranks cannot share them": (2, [name], "swiglu")
        for mixer, part, name in (("recurrent", "fixed_gate", "retnet"), ("attention", "alibi", "alibi"))
    },
    "gated_conv has channels = 7, which 2 ranks cannot share evenly": (2, ["odd convolution"], "swiglu"),
}


def refused(mesh, layout, mlp):
    made = model(layout, mlp)
    with pytest.raises(ValueError) as caught:
        split_heads(made, mesh)
    assert not any(isinstance(p, DTensor) for p in made.parameters())
    return str(caught.value)


def covered():
    """Of two ranks."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tensor",))
    return {(mixer, "swiglu"): split(mesh, mixer) for mixer in COVERED}


def main(directory):
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("tensor",)) for n in (2, 3)}
    found = {}
    if dist.get_rank() < 2:
        for mixer, mlp in QUICK:
            found[mixer, mlp] = split(meshes[2], mixer, mlp=mlp)
        found["objective"] = split(meshes[2], "polar", "rope", objective=OBJECTIVE)
        found["refused"] = [refused(meshes[n], layout, mlp) for n, layout, mlp in REFUSED.values()]
    found["both"] = both(directory)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(directory):
    return ranks(4, main, str(directory))


@pytest.fixture(scope="module")
def others():
    return ranks(2, covered)


def same(gradients, expected):
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        atol = 1e-10 * max(1, gradient.abs().max())
        torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("mixer, mlp", chosen(CASES, QUICK))
def test_shared_heads_give_the_loss_and_gradients_of_one_rank(request, mixer, mlp):
    found = request.getfixturevalue("others" if mixer in COVERED else "found")
    one = model([mixer], mlp)
    loss, gradients = passed(one)
    for rank in range(2):
        shared = found[rank][mixer, mlp]
        torch.testing.assert_close(shared[0], loss, rtol=1e-10, atol=0)
        same(shared[1], gradients)


def test_a_rank_keeps_its_heads_of_the_large_matrices(found):
    kept = found[0]["grouped values", "swiglu"][2]
    assert kept["0.mixer.q_proj.weight"] == (4, 8) and kept["0.mixer.o_proj.weight"] == (8, 12)
    assert kept["0.mlp.up_proj.weight"] == (6, 8) and kept["0.mlp.down_proj.weight"] == (8, 6)
    assert kept["0.mixer.write.gate.A_log"] == (4,)  # one number a head: copied


def test_an_objective_is_the_same_on_shared_heads(found):
    loss, gradients = passed(model(["polar", "rope"]), objective=OBJECTIVE)
    for rank in range(2):
        torch.testing.assert_close(found[rank]["objective"][0], loss, rtol=1e-10, atol=0)
        same(found[rank]["objective"][1], gradients)


def test_beside_fsdp_the_losses_gradients_and_weights_are_those_of_one_rank(found):
    one = model(HYBRID)
    loss, gradients = passed(one)
    gradients = {key: gradient.clone() for key, gradient in gradients.items()}
    one.zero_grad()
    losses = steps(one)
    for rank in range(4):
        shared = found[rank]["both"]
        torch.testing.assert_close(shared[0], loss, rtol=1e-10, atol=0)
        same(shared[1], gradients)
        # Newton–Schulz is bfloat16: a gradient's last bit may become the update's eighth
        torch.testing.assert_close(shared[2], losses, rtol=1e-3, atol=0)


def test_a_checkpoint_of_shared_heads_loads_in_one_process(found, directory):
    one = model(HYBRID)
    state = {key: torch.zeros_like(x) for key, x in one.state_dict().items()}
    dcp.load(state, checkpoint_id=f"{directory}/checkpoint", no_dist=True)
    saved = found[0]["both"][3]
    assert state.keys() == saved.keys() and all(torch.equal(state[key], saved[key]) for key in state)
    one.load_state_dict(state)


@pytest.mark.parametrize("message", REFUSED)
def test_heads_that_ranks_cannot_share_are_refused_before_anything_changes(found, message):
    assert f"tensor: {message}" in found[0]["refused"]


def test_a_mixer_that_nobody_taught_to_be_shared_is_refused():
    with pytest.raises(ValueError, match="softmax has no heads that 2 ranks could share"):
        _share(Softmax(), 8, 2)
