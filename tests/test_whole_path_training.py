"""Steps of training in numbers that are worked out here, one after another: gradient, clip, schedule, AdamW, decay, what the log says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from needlework.data import CorpusConfig, NeedleMix, Text, byte_tokenizer, load_corpus
from needlework.experiment.recipe import Phase
from needlework.recipes import demo
from needlework.train import AdamW, Cooldown, Cosine, TrainConfig, train

V, D, B, LENGTH = 7, 3, 2, 5


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        return self.head(self.embed(ids))


class Rows:
    def __init__(self, number):
        rng = np.random.default_rng(number)
        self.input_ids = torch.from_numpy(rng.integers(V, size=(B, LENGTH)))
        self.labels = torch.from_numpy(rng.integers(V, size=(B, LENGTH)))
        self.labels[0, : 1 + number % 3] = -100  # so many are not counted


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand(steps, accumulate, lr, beta1, beta2, eps, decay, clip, multiplier):
    """[(loss, norm, lr)] of each step, and the weights after the last, in float64."""
    model = Bigram()
    w = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    first, second = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    told = []
    for step in range(steps):
        batches = [Rows(step * accumulate + part) for part in range(accumulate)]
        counted = sum(int((rows.labels >= 0).sum()) for rows in batches)
        g, loss = {name: np.zeros_like(x) for name, x in w.items()}, 0.0
        for rows in batches:
            for token, label in zip(rows.input_ids.flatten().tolist(), rows.labels.flatten().tolist(), strict=True):
                if label < 0:
                    continue
                x = w["embed.weight"][token]
                p = softmax(w["head.weight"] @ x + w["head.bias"])
                loss -= math.log(p[label]) / counted
                p[label] -= 1
                p /= counted
                g["head.weight"] += np.outer(p, x)
                g["head.bias"] += p
                g["embed.weight"][token] += w["head.weight"].T @ p
        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        now = lr * multiplier(step)
        for name in w:
            x = g[name] * min(1, clip / (norm + 1e-6))
            first[name] = beta1 * first[name] + (1 - beta1) * x
            second[name] = beta2 * second[name] + (1 - beta2) * x**2
            if name == "head.weight":  # two axes and no embedding
                w[name] = w[name] * (1 - now * decay)
            m, v = first[name] / (1 - beta1 ** (step + 1)), second[name] / (1 - beta2 ** (step + 1))
            w[name] = w[name] - now * m / (np.sqrt(v) + eps)
        told.append((loss, norm, now))
    return told, w


@pytest.mark.parametrize("accumulate", (1, 3))
@pytest.mark.parametrize("clip", (0.05, 1e9))
@pytest.mark.parametrize("schedule", (Cosine(warmup=2, floor=0.1), Cooldown(warmup=3, flat=0.5, floor=0.2)))
def test_six_steps_are_those_worked_out(tmp_path, accumulate, clip, schedule):
    def multiplier(s):
        if s < schedule.warmup:
            return (s + 1) / schedule.warmup
        if schedule.kind == "cosine":
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (s - 2) / 4))
        return 1.0 if s <= 3 else 1 - 0.8 * (s - 3) / 3

    model = Bigram()
    optim = AdamW(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    config = TrainConfig(
        steps=6, seed=0, optim=optim, schedule=schedule, checkpoint_every=100, accumulate=accumulate, clip=clip, log_every=1
    )
    result = train(model, Rows, config, tmp_path)
    told, weights = by_hand(6, accumulate, 0.05, 0.8, 0.95, 1e-6, 0.3, clip, multiplier)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert result.losses == pytest.approx([loss for loss, *_ in told], rel=1e-5)
    assert result.tokens == 6 * accumulate * B * LENGTH
    for step, (line, (loss, norm, lr)) in enumerate(zip(log, told, strict=True), 1):
        assert line["step"] == step and line["tokens"] == step * accumulate * B * LENGTH
        assert (line["loss"], line["grad_norm"], line["lr"]) == (
            pytest.approx(loss, rel=1e-5),
            pytest.approx(norm, rel=1e-5),
            pytest.approx(lr),
        )
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), weights[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_each_phase_of_a_recipe_reads_its_own_batches_in_order_and_a_micro_batch_is_a_part_of_the_rows(small_text):
    corpus = load_corpus(CorpusConfig(kind="files", paths=small_text.paths, held_out=0.2), byte_tokenizer())
    tasks = NeedleMix(dense_pairs=(1, 2), sparse_pairs=(1, 1)), Text()
    phases = (Phase(steps=2, batch=4, length=80, task=tasks[0]), Phase(steps=3, batch=6, length=50, task=tasks[1]))
    recipe = demo.recipe("qdelta", small_text)
    recipe = replace(recipe, phases=phases, train=replace(recipe.train, steps=5, seed=9, accumulate=2))
    for step in range(5):
        phase = phases[step >= 2]
        whole = phase.task.batch(corpus, 9, step, phase.batch, phase.length)
        parts = [recipe.batch(corpus, 2 * step + part) for part in (0, 1)]
        assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert len(parts[0].input_ids) == phase.batch // 2
    assert recipe.tokens() == 2 * 4 * 80 + 3 * 6 * 50
