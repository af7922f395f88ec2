import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from needlework.train import AdamW, Cooldown, Muon, NonFiniteLoss, latest, load, train

from .tiny import CONFIG, OPTIMISERS, VOCABULARY, Tiny, batch, equal, lines, stop_at


@dataclass(frozen=True, kw_only=True)
class Descent(AdamW):
    """Plain gradient descent: the weights' displacement is the gradient."""

    lr: float = 1.0

    def build(self, named):
        return [torch.optim.SGD([p for _, p in named], lr=self.lr)]


@pytest.mark.parametrize("optim", OPTIMISERS)
def test_the_loss_falls(optim, tmp_path):
    losses = train(Tiny(), batch, replace(CONFIG, optim=OPTIMISERS[optim]), tmp_path).losses
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])


class Spoilt(Tiny):
    """Tiny whose logits go through `spoil` at one step."""

    def __init__(self, step, spoil):
        super().__init__()
        self.calls, self.at, self.spoil = 0, step * CONFIG.accumulate, spoil

    def forward(self, input_ids):
        self.calls += 1
        logits = super().forward(input_ids)
        return self.spoil(logits) if self.calls == self.at else logits


@pytest.mark.parametrize(
    "spoil",
    [
        lambda logits: logits * math.nan,
        lambda logits: logits * math.inf,
        lambda logits: logits + (logits - logits).sqrt(),  # adds zero, with an infinite slope
    ],
    ids=["a NaN loss", "an infinite loss", "a finite loss with a gradient that is not"],
)
def test_what_is_not_finite_stops_before_the_optimiser(tmp_path, spoil):
    model, untouched = Spoilt(5, spoil), Tiny()
    with pytest.raises(NonFiniteLoss, match=r"step 5: loss .*the last good checkpoint is .*step-00000003") as caught:
        train(model, batch, CONFIG, tmp_path / "spoilt")
    assert caught.value.step == 5
    train(untouched, batch, CONFIG, tmp_path / "stopped", stop=stop_at(4))
    assert equal(model, untouched)
    assert lines(tmp_path / "spoilt")[-1]["step"] == 4
    assert load(latest(tmp_path / "spoilt"))["run.step"] == 3


def test_a_step_without_a_label_is_refused(tmp_path):
    def unlabelled(index):
        return SimpleNamespace(input_ids=batch(index).input_ids, labels=torch.full((4, 6), -100))

    with pytest.raises(ValueError, match="step 1: labels: all are -100"):
        train(Tiny(), unlabelled, CONFIG, tmp_path)


def test_accumulation_is_the_large_batch(tmp_path):
    """Also where the micro-batches count different numbers of labels."""

    def ragged(index):
        b = batch(index)
        b.labels[:, : index % 4] = -100
        return b

    def large(index):
        parts = [ragged(3 * index + i) for i in range(3)]
        return SimpleNamespace(**{k: torch.cat([getattr(b, k) for b in parts]) for k in ("input_ids", "labels")})

    config = replace(CONFIG, steps=4, optim=Descent(), clip=math.inf)
    small_model, large_model = Tiny(dropout=0.0).double(), Tiny(dropout=0.0).double()
    small = train(small_model, ragged, replace(config, accumulate=3), tmp_path / "small")
    whole = train(large_model, large, replace(config, accumulate=1), tmp_path / "large")
    assert small.tokens == whole.tokens
    assert small.losses == pytest.approx(whole.losses, rel=1e-12)
    for a, b in zip(small_model.parameters(), large_model.parameters(), strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_clipping_bounds_the_gradient_and_records_its_norm(tmp_path):
    config = replace(CONFIG, steps=1, optim=Descent(), schedule=Cooldown(flat=1.0), clip=1e-2)
    model, start = Tiny().double(), Tiny().double()
    train(model, batch, config, tmp_path)
    norm = lines(tmp_path)[0]["grad_norm"]
    moved = torch.stack([(a - b).norm() for a, b in zip(model.parameters(), start.parameters(), strict=True)]).norm()
    assert norm > 1e-2
    assert moved.item() == pytest.approx(1e-2 * norm / (norm + 1e-6), rel=1e-12)  # PyTorch divides by norm + 1e-6


def test_the_loss_is_the_mean_cross_entropy_over_counted_labels(tmp_path):
    result = train(Tiny(dropout=0.0), batch, replace(CONFIG, steps=1, accumulate=1), tmp_path)
    logits, labels = Tiny(dropout=0.0)(batch(0).input_ids).double(), batch(0).labels
    expected = [-logits[b, t].log_softmax(-1)[labels[b, t]].item() for b in range(4) for t in range(5)]
    # Float32: V exponentials, a logarithm and 20 terms, each rounded once.
    assert result.losses[0] == pytest.approx(sum(expected) / 20, rel=(VOCABULARY + 20) * 2**-24)


def test_each_group_follows_the_schedule_from_its_own_peak(tmp_path):
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(Muon):
        def build(self, named):
            seen.extend(super().build(named))
            return seen

    config = replace(CONFIG, optim=Watched(**{f: getattr(OPTIMISERS["muon"], f) for f in OPTIMISERS["muon"].__dict__}))
    train(Tiny(), batch, config, tmp_path, stop=stop_at(5))
    multiplier = config.schedule.multiplier(4, 12)
    assert sorted(g["lr"] for o in seen for g in o.param_groups) == sorted(peak * multiplier for peak in (0.02, 1e-2, 0.1))
    assert lines(tmp_path)[-1]["lr"] == 0.02 * multiplier


def test_the_log_has_every_nth_step_and_the_last(tmp_path):
    train(Tiny(), batch, replace(CONFIG, log_every=5), tmp_path)
    assert [r["step"] for r in lines(tmp_path)] == [5, 10, 12]


def test_autocast_runs_the_model_in_bfloat16_and_keeps_weights_and_loss_in_float32(tmp_path):
    dtypes = []
    model = Tiny()
    model.head.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    result = train(model, batch, replace(CONFIG, autocast="bf16"), tmp_path)
    assert set(dtypes) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert any(torch.tensor(result.losses).bfloat16().double() != torch.tensor(result.losses).double())


def test_a_model_may_return_an_object_with_logits(tmp_path):
    class Wrapped(Tiny):
        def forward(self, input_ids):
            return SimpleNamespace(logits=super().forward(input_ids))

    assert train(Wrapped(), batch, CONFIG, tmp_path / "a").losses == train(Tiny(), batch, CONFIG, tmp_path / "b").losses


@pytest.mark.parametrize(
    "field, value",
    [
        ("steps", 0),
        ("steps", 2.5),
        ("steps", True),
        ("seed", -1),
        ("seed", 1 << 64),
        ("accumulate", 0),
        ("checkpoint_every", 0),
        ("keep", 0),
        ("log_every", -3),
        ("clip", 0.0),
        ("clip", math.nan),
        ("clip", "1"),
        ("autocast", "fp8"),
    ],
)
def test_a_config_that_cannot_run_is_refused(field, value):
    with pytest.raises(ValueError, match=f"train: {field} is {value!r}, expected "):
        replace(CONFIG, **{field: value})
