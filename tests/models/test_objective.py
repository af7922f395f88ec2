"""What an objective asks of a whole model: which terms, in which shares, in every block, whatever the batch and the checkpointing."""

import pytest
import torch
from torch import Tensor

from needlework.layers import (
    Attention,
    Canon,
    Discrete,
    Distractor,
    GatedConv,
    Memory,
    Objective,
    Polar,
    Softmax,
    SquaredReLU,
    Strong,
    Weak,
    Zipfian,
    from_dict,
)
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.compare import EXACT, assert_close, relative

VOCABULARY, B, T = 29, 3, 14
REGULARISERS = [Weak(), Strong(), Discrete(), Zipfian()]
kinds = lambda config: config.kind


def attention(attend, **settings) -> Attention:
    return Attention(
        heads=4, kv_heads=2, head_dim=8, attend=attend, conv=Canon(), qk_norm=True, output_gate=True, bias=True, **settings
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    mixers = {"c": GatedConv(), "p": attention(Polar(window=5), memory=Memory()), "s": attention(Softmax())}
    config = NeedleworkConfig(
        vocab_size=VOCABULARY, hidden_size=16, layout="cpsc", mixers=mixers, mlp=SquaredReLU(hidden=24),
        tie_word_embeddings=False, head_bias=True, softcap=15.0, initializer_range=0.3,
    )  # fmt: skip
    return NeedleworkForCausalLM(config).double().train()


def sample(rows: int = B) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def run(model, objective: Objective | None, batch=None):
    torch.manual_seed(2)
    tokens, targets = batch or sample()
    return model(tokens, targets=targets, objective=objective)


def gradient(model, value: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True, retain_graph=True)
    return dict(zip(names, found, strict=True))


def test_without_an_objective_it_is_the_cross_entropy_alone(model):
    found = run(model, None)
    assert (found.share, found.auxiliary, found.parts) == (1.0, None, {})
    assert torch.equal(found.cross_entropy, run(model, Objective()).cross_entropy)
    beside = run(model, Objective())
    assert (beside.share, beside.auxiliary, beside.parts, beside.nats) == (1.0, None, {}, None)


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=kinds)
def test_a_regulariser_is_the_mean_over_every_block_s_output(model, regulariser):
    outputs = []
    whole = lambda out: (out[0] + out[1]).detach()
    hooks = [b.register_forward_hook(lambda _, __, out: outputs.append(whole(out))) for b in model.model.blocks]
    found = run(model, Objective(regulariser=regulariser))
    for hook in hooks:
        hook.remove()
    torch.manual_seed(2)
    expected = sum(regulariser(x) for x in outputs) / 4
    assert relative(found.parts["regulariser"], expected) < EXACT and expected > 0
    assert found.share == 0.99 and relative(found.auxiliary.detach(), 0.01 * expected) < EXACT


def test_the_distractor_is_the_mean_over_layers_that_attend(model):
    inputs = []
    norms = [model.model.blocks[i].mixer_norm for i in (1, 2)]
    hooks = [norm.register_forward_hook(lambda _, __, out: inputs.append(out.detach())) for norm in norms]
    found = run(model, Objective(distractor=Distractor()))
    for hook in hooks:
        hook.remove()
    torch.manual_seed(2)
    with torch.no_grad():
        expected = (
            sum(model.model.blocks[i].mixer.distraction(h, Distractor()) for i, h in zip((1, 2), inputs, strict=True)) / 2
        )
    assert relative(found.parts["distractor"], expected) < EXACT and expected > 0
    assert found.share == 1 and relative(found.auxiliary.detach(), 0.01 * expected) < EXACT


EVERY = [{"regulariser": r} for r in REGULARISERS] + [{"distractor": Distractor()}]


@pytest.mark.parametrize("term", EVERY, ids=lambda term: next(iter(term.values())).kind)
def test_a_term_s_share_of_the_gradient_is_its_weight(model, term):
    """A weight three times as large pulls three times as hard, and the term pulls as its own gradient says."""
    (name,) = term
    once, thrice = (run(model, Objective(**term, **{f"{name}_weight": weight})) for weight in (0.02, 0.06))
    first, third = gradient(model, once.auxiliary), gradient(model, thrice.auxiliary)
    assert_close(third, {n: 3 * g for n, g in first.items()}, name)
    assert once.share == (0.98 if name == "regulariser" else 1) and thrice.share == (0.94 if name == "regulariser" else 1)
    if name == "regulariser":
        reached = {n for n, g in first.items() if g.any()}
        assert {"model.embed.weight", "model.blocks.3.mlp.proj.weight"} <= reached and "lm_head.weight" not in reached
    else:
        assert not first["model.blocks.3.mlp.proj.weight"].any() and first["model.blocks.1.mixer.attend.gamma"].any()


@pytest.fixture
def same_draws(monkeypatch):
    """Random numbers by shape alone, the same in each half of a batch of twice the rows."""
    draw, like = torch.randn, torch.randn_like
    noise = like(torch.zeros(B, T, 16, dtype=torch.float64))
    fixed = lambda *shape, **settings: draw(*shape, generator=torch.Generator().manual_seed(3), **settings)
    monkeypatch.setattr(torch, "randn", fixed)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise.repeat(len(x) // B, 1, 1))


def test_the_whole_gradient_is_the_sum_of_its_shares(model, same_draws):
    both = Objective(regulariser=Weak(), distractor=Distractor(), regulariser_weight=0.2, distractor_weight=0.3)
    found = run(model, both)
    whole = gradient(model, found.share * found.cross_entropy / (B * T) + found.auxiliary)
    entropy = gradient(model, run(model, None).cross_entropy / (B * T))
    weak = gradient(model, 2 * run(model, Objective(regulariser=Weak(), regulariser_weight=0.5)).auxiliary)
    distractor = gradient(model, run(model, Objective(distractor=Distractor(), distractor_weight=1)).auxiliary)
    assert_close(whole, {n: 0.8 * entropy[n] + 0.2 * weak[n] + 0.3 * distractor[n] for n in whole}, "the whole")


def test_twice_the_batch_and_twice_the_micro_batches_leave_the_step(model, same_draws):
    """share · Σ ce / counted + Σ auxiliary / micro-batches: one batch, the batch twice in one, the batch twice in two."""
    objective = Objective(regulariser=Strong(), distractor=Distractor(), regulariser_weight=0.3, distractor_weight=0.3)
    tokens, targets = sample()
    one = run(model, objective)
    two = run(model, objective, (torch.cat([tokens, tokens]), torch.cat([targets, targets])))
    step = gradient(model, one.share * one.cross_entropy / (B * T) + one.auxiliary)
    large = gradient(model, two.share * two.cross_entropy / (2 * B * T) + two.auxiliary)
    micro = gradient(model, 2 * (one.share * one.cross_entropy / (2 * B * T) + one.auxiliary / 2))
    assert_close(large, step, "one batch of twice the rows")
    assert_close(micro, step, "two micro-batches")


def test_the_published_sum_is_a_share_of_as_many_tokens():
    plain, summed = (Objective(regulariser=Weak(), summed_over=n) for n in (None, 8192))
    assert plain.share == 0.99 and summed.share == 0.99 * 8192


def test_checkpointing_draws_the_same_numbers_again(model):
    objective = Objective(regulariser=Zipfian(), distractor=Distractor())
    plain = run(model, objective)
    expected = gradient(model, plain.auxiliary)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = run(model, objective)
    model.zero_grad()
    again.auxiliary.backward()  # checkpoints are made again by backward alone
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.gradient_checkpointing_disable()
    model.zero_grad()
    assert torch.equal(again.auxiliary, plain.auxiliary)
    assert_close(found, expected, "checkpointed")


def test_an_objective_survives_its_dict():
    objective = Objective(regulariser=Strong(summed=True), distractor=Distractor(raw_keys=True), summed_over=8192)
    assert from_dict(objective.to_dict()) == objective


def test_what_an_objective_cannot_be_is_said(model):
    with pytest.raises(ValueError, match="regulariser is 'weak', expected a Regulariser or None"):
        Objective(regulariser="weak")
    with pytest.raises(ValueError, match=r"regulariser_weight is 1, expected a number in \[0, 1\)"):
        Objective(regulariser_weight=1)
    with pytest.raises(ValueError, match="distractor_weight is -1"):
        Objective(distractor_weight=-1)
    with pytest.raises(ValueError, match="summed_over is 0, expected a whole number >= 1 or None"):
        Objective(summed_over=0)
    tokens, _ = sample()
    objective = Objective(distractor=Distractor())
    with pytest.raises(ValueError, match="give targets too"):
        model(tokens, objective=objective)
    with pytest.raises(ValueError, match="needs whole sequences"):
        model(
            tokens,
            targets=tokens,
            objective=objective,
            use_cache=True,
            past_key_values=model(tokens, use_cache=True).past_key_values,
        )
    config = NeedleworkConfig(vocab_size=VOCABULARY, hidden_size=16, layout="c", mixers={"c": GatedConv()})
    with pytest.raises(ValueError, match="the layout has none"):
        NeedleworkForCausalLM(config)(tokens, targets=tokens, objective=objective)
