"""Every mixer that the configs can make: round trip, cut and resume, packing, state bytes, gradients, starts."""

import copy
import dataclasses
import json
import math

import pytest
import torch

from needlework.layers import (
    CCQ,
    KINDS,
    Alibi,
    Attention,
    Canon,
    Carve,
    ChannelGate,
    Comba,
    Delta,
    DeltaProduct,
    Differential,
    FixedGate,
    Fox,
    GatedConv,
    GatedNorm,
    Gdn2,
    HalfRope,
    HeadNorm,
    Hedgehog,
    Linear,
    Llama3Rope,
    Longhorn,
    LowRankGate,
    Lucid,
    LucidPath,
    Mamba,
    Mamba2,
    Mamba3,
    Memory,
    OutputGate,
    PairRope,
    Path,
    Plain,
    Polar,
    QDelta,
    Recurrent,
    RetentionGate,
    Rope,
    Rwkv7,
    ScalarGate,
    ShortConv,
    Silu,
    Softmax,
    SquaredReLU,
    SSMax,
    SwiGLU,
    from_dict,
)
from needlework.layers.state import map_state, nbytes

DIM = 32
WRITES = {
    "linear": Linear(),
    "retnet": Linear(gate=FixedGate()),
    "gla": Linear(gate=LowRankGate(rank=4)),
    "deltanet": Delta(),
    "gated_deltanet": Delta(gate=ScalarGate()),
    "retention": Delta(gate=RetentionGate()),
    "retention_spread": Delta(gate=RetentionGate(half_life=(32.0, 8192.0))),
    "kda": Delta(gate=ChannelGate()),
    "gdn2": Gdn2(),
    "qdelta": QDelta(),
    "qdelta_fixed": QDelta(lam=0.5, gate=None),
    "qdelta_factor": QDelta(factor=0.5),
    "qdelta_doubled": QDelta(allow_neg_eigval=True),
    "carve": Carve(rank=4, content_chunk=16),
}
READS = {"plain": Plain(), "ccq": CCQ()}


def recurrent(write, read=None, **settings):
    return Recurrent(**{"heads": 2, "key_dim": 8, "value_dim": 16, "write": write, "read": read or Plain()} | settings)


def attention(attend, **settings):
    return Attention(**{"heads": 4, "kv_heads": 2, "head_dim": 8, "attend": attend} | settings)


CONFIGS = {f"{w}-{r}": recurrent(WRITES[w], READS[r]) for w in WRITES for r in READS} | {
    "deltaproduct": recurrent(DeltaProduct(), value_heads=4),
    "deltaproduct of three, no gate": recurrent(DeltaProduct(write_rank=3, gate=None, allow_neg_eigval=False)),
    "deltaproduct of one": recurrent(DeltaProduct(write_rank=1), CCQ()),
    "comba, grouped": recurrent(Comba(), value_heads=4),
    "ccq on comba": recurrent(Comba(gate=ChannelGate()), CCQ()),
    "longhorn": recurrent(Longhorn(), value_heads=4),
    "rwkv-7": recurrent(Rwkv7(rank=4), conv=None),
    "ccq on rwkv-7": recurrent(Rwkv7(rank=4), CCQ(aligned=True)),
    "kda with its output gate": recurrent(Delta(gate=ChannelGate(), allow_neg_eigval=True), output_gate=OutputGate()),
    "gdn2 with its output gate": recurrent(Gdn2(allow_neg_eigval=True), output_gate=OutputGate(activation="silu", rank=3)),
    "aligned ccq on gated deltanet": recurrent(Delta(gate=ScalarGate()), CCQ(aligned=True)),
    "aligned ccq on gla, grouped": recurrent(Linear(gate=LowRankGate()), CCQ(aligned=True), value_heads=4),
    "ccq with a factor on gated deltanet": recurrent(Delta(gate=ScalarGate()), CCQ(factor=0.5)),
    "ccq on qdelta, grouped values": recurrent(QDelta(), CCQ(), value_heads=4),
    "carve of rank 2, decayed": recurrent(Carve(rank=4, content_chunk=8, write_rank=2, prediction="decayed"), conv=Silu()),
    "two turned rows a token": recurrent(Carve(rank=0, content_chunk=8, write_rank=2), position=HalfRope()),
    "retnet": recurrent(Linear(gate=FixedGate()), position=PairRope(), conv=None, norm=HeadNorm(weight=False)),
    "positions, ccq on a turned query": recurrent(QDelta(), CCQ(), position=Rope(), value_heads=4),
    "hedgehog": recurrent(Linear(features=Hedgehog(), normalise=True), conv=None),
    "hedgehog in two calls, fixed decay": recurrent(
        Linear(gate=FixedGate(), features=Hedgehog(heads="shared"), normalise=True), key_dim=130, value_dim=2, value_heads=4
    ),
    "ccq on gla-hedgehog": recurrent(
        Linear(gate=LowRankGate(rank=4), features=Hedgehog(map="joint", heads="shared")), CCQ(aligned=True), value_heads=4
    ),
    "mamba-2": recurrent(Mamba2(), heads=1, value_heads=4, conv=ShortConv(bias=True), norm=GatedNorm()),
    "ccq on mamba-2, two groups": recurrent(
        Mamba2(), CCQ(aligned=True), value_heads=4, conv=ShortConv(bias=True), norm=GatedNorm()
    ),
    "no convolution, no output gate": recurrent(Delta(), conv=None, output_gate=False),
    "kda, gated as published": recurrent(Delta(gate=ChannelGate()), value_heads=4, output_gate=OutputGate()),
    "softmax, rope": attention(Softmax(), position=Rope()),
    "softmax, weighted norms": attention(Softmax(), position=Llama3Rope(length=16), qk_norm="weighted"),
    "softmax, nothing": attention(Softmax(), kv_heads=None),
    "sliding window": attention(Softmax(window=7), position=Rope()),
    "atma rope with memory": attention(
        Softmax(scale=0.12), position=HalfRope(), qk_norm=True, output_gate=True, bias=True, memory=Memory()
    ),
    "ssmax": attention(SSMax(), position=Rope(), qk_norm=True),
    "ssmax in a window": attention(SSMax(window=7, scale=0.3)),
    "alibi": attention(Alibi(), kv_heads=3, heads=6),
    "alibi in a window": attention(Alibi(window=7, scale=0.3)),
    "fox": attention(Fox(), qk_norm=True, conv=Canon()),
    "fox in a window": attention(Fox(window=7, scale=0.3), kv_heads=4),
    "fox in a window of two, with memory": attention(Fox(window=2), memory=Memory()),
    "lucid": attention(Lucid(), position=Rope()),
    "lucid qk": attention(Lucid(precondition="qk")),
    "lucid rowmax": attention(Lucid(precondition="rowmax")),
    "lucid beta": attention(Lucid(precondition="beta")),
    "lucid in a sliding window": attention(Lucid(window=7), position=Rope()),
    "lucid solved globally, read in a window": attention(Lucid(window=7, solve="global")),
    "memory beside lucid": attention(Lucid(), conv=Canon(), memory=Memory(write=QDelta(), read=CCQ())),
    "polar": attention(Polar(), conv=Canon(), qk_norm=True, output_gate=True, bias=True),
    "polar in a window": attention(Polar(window=7)),
    "polar and memory": attention(Polar(), conv=Canon(), qk_norm=True, output_gate=True, bias=True, memory=Memory()),
    "polar and a kda memory": attention(Polar(), conv=ShortConv(), memory=Memory(write=Delta(gate=ChannelGate()))),
    "path": attention(Path(rank=4)),
    "path without convolution": attention(Path(rank=None, conv=None), kv_heads=None, qk_norm=True),
    "path in a window and a memory": attention(Path(window=7, rank=4), conv=Canon(), memory=Memory()),
    "path that forgets": attention(Path(rank=4, forget=True)),
    "path that forgets, in a window": attention(Path(window=7, rank=None, conv=None, forget=True), kv_heads=4),
    "lucid path": attention(LucidPath()),
    "lucid path in a window, convolved": attention(LucidPath(window=7, rank=4, conv=3)),
    "differential": attention(Differential(), position=Rope()),
    "differential in a window": attention(Differential(window=7)),
    "gated convolution": GatedConv(),
    "mamba3": Mamba3(heads=4, key_dim=8, value_dim=6, groups=2),
    "mamba3 mimo": Mamba3(
        heads=4, key_dim=8, value_dim=6, rank=2, pairs="halves", turning="all", decay="rational", output_norm=True
    ),
    "mamba": Mamba(channels=12, state=3, rank=4),
}
EXACT = 1e-12


def build(config, seed=0):
    torch.manual_seed(seed)
    mixer = config.build(DIM).double()
    with torch.no_grad():
        for p in mixer.parameters():  # away from starts at zero, where a branch could hide
            p.add_(0.05 * torch.randn_like(p))
    return mixer


def sample(T, B=2, seed=1):
    return torch.randn(B, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b):
    assert a.shape == b.shape
    a, b = a.detach(), b.detach()
    return float((a - b).norm()) <= EXACT * max(float(b.norm()), 1e-2)


@pytest.fixture(params=CONFIGS, scope="module")
def config(request):
    return CONFIGS[request.param]


def test_a_config_survives_json(config):
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_pieces_with_carried_state_are_the_whole(config):
    mixer, x = build(config), sample(37)
    whole, final = mixer(x, output_final_state=True)
    state, parts = None, []
    for piece in x.split([1, 2, 17, 1, 16], 1):
        y, state = mixer(piece, state, output_final_state=True)
        parts.append(y)
    assert close(torch.cat(parts, 1), whole)
    a, b = [], []
    map_state(final, a.append)
    map_state(state, b.append)
    assert all(torch.equal(x, y) if not x.is_floating_point() else close(y, x) for x, y in zip(a, b, strict=True))


def test_state_size_is_the_bytes_held(config):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mixer = copy.deepcopy(build(config)).to(dtype)
        for T in (3, 21):
            _, state = mixer(sample(T, B=1).to(dtype), output_final_state=True)
            assert mixer.state_size(T, dtype) == nbytes(state), f"{dtype}, T = {T}"


def test_packed_documents_are_separate_calls(config):
    mixer, x = build(config), sample(30, B=1)
    packed, states = mixer(x, None, torch.tensor([0, 5, 7, 30]), True)
    for n, (a, b) in enumerate([(0, 5), (5, 7), (7, 30)]):
        y, state = mixer(x[:, a:b], output_final_state=True)
        assert close(packed[:, a:b], y)
        held, want = [], []
        map_state(states, lambda t, n=n, held=held: held.append(t[n : n + 1]))
        map_state(state, want.append)
        for got, expected in zip(held, want, strict=True):
            rows = tuple(slice(0, size) for size in expected.shape)  # pages are as long as the longest document
            assert close(got[rows].double(), expected.double())


def test_packed_documents_go_on_each_from_its_own_state(config):
    mixer, x, more = build(config), sample(30, B=1), sample(13, B=1, seed=2)
    ends, later = (0, 5, 7, 30), (0, 4, 4, 13)  # nothing more of the second
    _, states = mixer(x, None, torch.tensor(ends), True)
    y, _ = mixer(more, states, torch.tensor(later), True)
    for a, b, c, d in zip(ends[:-1], ends[1:], later[:-1], later[1:], strict=True):
        whole, _ = mixer(torch.cat([x[:, a:b], more[:, c:d]], 1))
        assert close(y[:, c:d], whole[:, b - a :])


def test_the_future_changes_nothing_before_it(config):
    mixer, x = build(config), sample(25)
    y, _ = mixer(x)
    changed = x.clone()
    changed[:, 11:] = sample(25, seed=2)[:, 11:]
    assert close(mixer(changed)[0][:, :11], y[:, :11])


def test_every_parameter_receives_a_finite_gradient(config):
    mixer = build(config)
    y, _ = mixer(sample(37))
    (y * sample(37, seed=3)).sum().backward()
    for name, p in mixer.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any(), name


def test_half_precision_runs_and_returns_its_dtype(config):
    mixer = build(config).to(torch.bfloat16)
    y, _ = mixer(sample(9).to(torch.bfloat16))
    assert y.dtype == torch.bfloat16 and torch.isfinite(y).all()


def test_memory_is_a_no_op_at_first():
    torch.manual_seed(0)
    plain = attention(Polar(), conv=Canon(), bias=True)
    with_memory = dataclasses.replace(plain, memory=Memory()).build(DIM)
    without = plain.build(DIM)
    without.load_state_dict({k: v for k, v in with_memory.state_dict().items() if not k.startswith("memory")})
    x = sample(21).float()
    assert torch.equal(with_memory(x)[0], without(x)[0])


def test_carve_starts_memory_blind():
    """W₂ = 0 at the start: bit-equal to any other W₁ (spec/carve.md)."""
    mixer = recurrent(Carve(rank=4, content_chunk=8)).build(DIM)
    x = sample(33).float()
    y, _ = mixer(x)
    torch.nn.init.normal_(mixer.write.w1)
    assert torch.equal(mixer(x)[0], y)


def test_lucid_beta_starts_equal_to_key():
    torch.manual_seed(0)
    beta, key = attention(Lucid(precondition="beta")).build(DIM), attention(Lucid()).build(DIM)
    key.load_state_dict({k: v for k, v in beta.state_dict().items() if "beta" not in k})
    x = sample(21)
    assert close(beta.double()(x)[0], key.double()(x)[0])


GATES = {
    "a head": ScalarGate(half_life=100.0),
    "a channel": ChannelGate(half_life=100.0),
    "retention": RetentionGate(half_life=100.0),
    "a head, spread": ScalarGate(half_life=(32.0, 8192.0)),
    "a channel, spread": ChannelGate(half_life=(32.0, 8192.0)),
    "retention, spread": RetentionGate(half_life=(32.0, 8192.0)),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_a_gate_starts_at_its_half_life(gate):
    """Of n gates spread over (low, high) in log the i-th has low · (high/low)^((i + 1/2)/n); the channels of a head are spread alike."""
    mixer = recurrent(Delta(gate=gate), heads=3).build(DIM)
    g = mixer.write.gate(torch.zeros(1, 1, DIM))[0, 0]  # [H] or [H K]
    n = g.shape[-1]
    expected = [32 * 256 ** ((i + 0.5) / n) for i in range(n)] if isinstance(gate.half_life, tuple) else [100.0] * n
    rounding = 4 * 16 * torch.finfo(torch.float32).eps  # g is near e^logit, a logit is below 16 and rounded a few times
    assert torch.allclose(-math.log(2) / g, torch.tensor(expected).expand(g.shape), rtol=rounding, atol=0)


@pytest.mark.parametrize("mlp", [SwiGLU(hidden=48), SquaredReLU(hidden=48)])
def test_mlps_keep_the_shape_and_survive_json(mlp):
    assert mlp.build(DIM)(torch.randn(2, 5, DIM)).shape == (2, 5, DIM)
    assert from_dict(mlp.to_dict()) == mlp


def test_every_kind_has_its_own_name():
    assert len({k.kind for k in KINDS}) == len(KINDS)


def test_an_unknown_kind_and_an_unknown_field_name_the_nearest():
    with pytest.raises(ValueError, match=r"unknown kind 'qdleta' .did you mean 'qdelta'"):
        from_dict({"kind": "qdleta"})
    with pytest.raises(ValueError, match=r"unknown field 'windw' .did you mean 'window'"):
        from_dict({"kind": "softmax", "windw": 3})


def test_combinations_that_cannot_be_say_why():
    with pytest.raises(ValueError, match="CARVE's decay depends on its own outputs"):
        recurrent(Carve(), CCQ(aligned=True)).build(DIM)
    with pytest.raises(ValueError, match="multiple of heads = 2"):
        recurrent(Delta(), value_heads=3).build(DIM)
    with pytest.raises(ValueError, match="multiple of kv_heads = 3"):
        attention(Softmax(), kv_heads=3).build(DIM)


def test_doubled_strengths_are_twice_the_strengths():
    """spec/qdelta.md: allow_neg_eigval doubles β and λ."""
    torch.manual_seed(0)
    once, twice = recurrent(QDelta()).build(DIM), recurrent(QDelta(allow_neg_eigval=True)).build(DIM)
    twice.load_state_dict(once.state_dict())
    x = sample(5).float()
    assert torch.equal(twice.write.beta(x), 2 * once.write.beta(x))
    assert torch.equal(twice.write.lam(x), 2 * once.write.lam(x))
