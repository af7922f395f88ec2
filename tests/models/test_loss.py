"""The head's cross entropy without logits: values and gradients of the plain one, in pieces, in half precision, in memory."""

import builtins
from collections import Counter
from functools import partial
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, loss
from needlework.models.loss import linear_cross_entropy, softcap
from needlework.testing.compare import assert_close, relative
from needlework.testing.rows import chosen

N, D, V = 37, 16, 41
BOTH = pytest.mark.parametrize("cap", [None, 3.0])


@pytest.fixture(autouse=True)
def seven_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(loss, "LOGITS", 7 * V + 3)


def sample(dtype=torch.float64) -> dict[str, Tensor]:
    """Logits of some size; a third of the targets is ignored, among them one whole piece."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, generator=g).to(dtype) for s in ((N, D), (V, D), (V,)))
    targets = torch.randint(V, (N,), generator=g)
    targets[::4] = targets[14:21] = -100
    return {"x": x, "weight": weight, "bias": bias, "targets": targets}


def plain(x, weight, bias, targets, cap=None) -> Tensor:
    z = softcap(linear(x, weight, bias), cap)
    return cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), targets, reduction="sum")


def differentiated(
    function, inputs: dict, cap=None, autocast: bool = False, wanted=("x", "weight", "bias")
) -> dict[str, Tensor]:
    inputs = {n: v.detach().requires_grad_(n in wanted) if n != "targets" and v is not None else v for n, v in inputs.items()}
    wanted = [n for n in wanted if inputs[n] is not None]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = function(**inputs, cap=cap)
    gradients = torch.autograd.grad(0.3 * value, [inputs[n] for n in wanted])
    assert all(g.dtype == inputs[n].dtype for n, g in zip(wanted, gradients, strict=True))
    return {"loss": value.detach()} | dict(zip(wanted, gradients, strict=True))


@BOTH
@pytest.mark.parametrize("rows", [1, 6, 7, 36, 37, 1000])
def test_value_and_gradients_are_the_plain_ones_wherever_it_is_cut(cap, rows, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS", rows * V)
    assert_close(differentiated(linear_cross_entropy, sample(), cap), differentiated(plain, sample(), cap), f"{rows} rows")


@BOTH
@pytest.mark.parametrize("rows", [6, 1000])
def test_a_target_with_an_emphasis_is_counted_so_many_times_and_its_nats_are_told_without_it(cap, rows, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS", rows * V)
    times = torch.linspace(0, 8, N, dtype=torch.float64)
    each = lambda x, weight, bias, targets, cap=None: cross_entropy(
        softcap(linear(x, weight, bias), cap), targets, reduction="none"
    )
    weighted = lambda cap=None, **inputs: (times * each(**inputs, cap=cap)).sum()
    ours = lambda cap=None, **inputs: loss.emphasised_cross_entropy(**inputs, emphasis=times, cap=cap)[0]
    assert_close(differentiated(ours, sample(), cap), differentiated(weighted, sample(), cap), f"{rows} rows")
    nats = loss.emphasised_cross_entropy(
        **{n: x.requires_grad_(x.is_floating_point()) for n, x in sample().items()}, emphasis=times, cap=cap
    )[1]
    assert not nats.requires_grad and torch.allclose(nats, each(**sample(), cap=cap), rtol=1e-12, atol=0)


@BOTH
def test_a_head_without_bias(cap):
    inputs = sample() | {"bias": None}
    assert_close(differentiated(linear_cross_entropy, inputs, cap), differentiated(plain, inputs, cap), "no bias")


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")])
def test_only_what_is_asked_for_is_differentiated(wanted):
    found, expected = (differentiated(f, sample(), 3.0, wanted=wanted) for f in (linear_cross_entropy, plain))
    assert_close(found, expected, str(wanted))


def test_nothing_counted_is_zero_with_zero_gradients():
    found = differentiated(linear_cross_entropy, sample() | {"targets": torch.full((N,), -100)}, 3.0)
    assert all(not x.any() for x in found.values())


@BOTH
def test_under_autocast_it_errs_no_more_than_the_plain_one(cap):
    """Products in bfloat16 on float32 weights; softcap and softmax in float32."""
    exact = differentiated(plain, sample(), cap)
    ours, theirs = (differentiated(f, sample(torch.float32), cap, autocast=True) for f in (linear_cross_entropy, plain))
    assert ours["loss"].dtype == torch.float32
    for name, x in exact.items():
        assert 1e-5 < relative(theirs[name], x)  # it does run in half precision
        assert relative(ours[name], x) < 1.2 * relative(theirs[name], x), name


def test_the_weight_s_gradient_is_summed_in_float32(monkeypatch):
    """600 times the same row, one at a time: a sum in bfloat16 stops growing after 256 of them."""
    monkeypatch.setattr(loss, "LOGITS", V)
    one = {n: x[:1] if n in ("x", "targets") else x for n, x in sample(torch.bfloat16).items()} | {"targets": torch.tensor([3])}
    many = one | {"x": one["x"].repeat(600, 1), "targets": one["targets"].repeat(600)}
    single, sum_ = (differentiated(linear_cross_entropy, inputs) for inputs in (one, many))
    assert sum_["weight"].dtype == torch.bfloat16
    assert relative(sum_["weight"], 600 * single["weight"].float()) < 2**-7


def test_tied_weights_get_both_gradients():
    torch.manual_seed(0)
    config = NeedleworkConfig(
        vocab_size=V, hidden_size=D, layout="G", mixers={"G": {"kind": "gated_conv"}}, tie_word_embeddings=True
    )
    model = NeedleworkForCausalLM(config).double().train()
    tokens, targets = (torch.randint(V, (3, 11), generator=torch.Generator().manual_seed(i)) for i in (1, 2))

    def gradients(value):
        model.zero_grad()
        value().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    found = gradients(lambda: model(tokens, targets=targets).cross_entropy)
    expected = gradients(lambda: cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    assert_close(found, expected, "tied")


class Watch(TorchDispatchMode):
    """Sees every operator and every tensor that it makes, in the backward pass too."""

    def __init__(self):
        super().__init__()
        self.numbers, self.ran = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[str(func.overloadpacket)] += 1
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, prod(x.shape))
        return out


@BOTH
def test_the_logits_of_all_rows_never_exist(cap):
    with Watch() as ours:
        differentiated(linear_cross_entropy, sample(), cap)
    with Watch() as theirs:
        differentiated(plain, sample(), cap)
    assert theirs.numbers == N * V and ours.numbers == max(7 * V, V * D)


def test_without_gradients_no_gradient_is_made():
    inputs = {n: x.requires_grad_() if n != "targets" else x for n, x in sample().items()}
    with Watch() as training:
        linear_cross_entropy(**inputs)
    with torch.no_grad(), Watch() as reading:
        linear_cross_entropy(**inputs)
    assert (
        training.ran["aten.mm"] + training.ran["aten.addmm"]
        == 3 * 6
        == 3 * (reading.ran["aten.mm"] + reading.ran["aten.addmm"])
    )


def test_targets_that_are_no_tokens_are_an_error():
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(**sample() | {"targets": torch.full((N,), V)})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"impl": "ligre"}, ValueError, """loss_impl: got 'ligre', expected "torch" or "liger\""""),
        ({"impl": "liger", "cap": 15.0}, ValueError, r"its softcap is c·tanh\(z/c\), this model's 15.0·z"),
        ({"impl": "liger"}, ValueError, "its kernels run on CUDA, the hidden states are on cpu"),
    ],
)
def test_what_cannot_be_done_is_said(settings, error, message):
    with pytest.raises(error, match=message):
        linear_cross_entropy(**sample(), **settings)


def test_a_missing_liger_names_the_package(monkeypatch):
    real = builtins.__import__

    def without(name, *args):
        if name.startswith("liger"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    x = SimpleNamespace(device=SimpleNamespace(type="cuda"))  # asked for its device alone
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        loss._liger(x, None, None, None, None, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels run on CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_gives_the_plain_loss_and_gradients(dtype):
    pytest.importorskip("liger_kernel")
    exact = differentiated(plain, {n: x.cuda() for n, x in sample().items()})
    inputs = {n: x.cuda() for n, x in sample(dtype).items()}
    ours, liger = (differentiated(partial(linear_cross_entropy, impl=impl), inputs) for impl in ("torch", "liger"))
    for name, x in exact.items():
        assert relative(liger[name], x) < 2 * relative(ours[name], x) + 1e-6, name


@BOTH
@pytest.mark.parametrize("backend", chosen(["aot_eager", "inductor"], quick=["aot_eager"]))
def test_compiled_it_is_the_same(monkeypatch, cap, backend):
    """What runs on a GPU: the softmax and its gradient as one graph."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compile(f, backend=backend, **settings))
    compiled = loss._compiled.__wrapped__()
    x, weight, bias, targets = sample().values()
    z = linear(x, weight, bias)
    for training in (True, False):
        arguments = z, targets, torch.linspace(0, 8, N, dtype=torch.float64), cap, torch.float64, training
        for found, want in zip(compiled(*arguments), loss._cross_entropy(*arguments), strict=True):
            assert (found is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
