"""What doctor judges first launches every kernel that the rest of its rules launch."""

import os
from collections import defaultdict

import pytest
import torch

from needlework.testing import compare, steps, target_inputs, targets


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
def test_the_covering_rules_launch_every_kernel_that_another_does(monkeypatch):
    """But LUCID's `top`, of "rowmax" alone: the first config and a full run judge it."""
    from triton.runtime.interpreter import InterpretedFunction

    launched, run = defaultdict(set), InterpretedFunction.run

    def heard(self, *args, **kwargs):
        launched[now].add(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", heard)
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    for rule in targets.RULES:
        spec = target_inputs.spec_of(rule.spec)
        inputs = target_inputs.sample(rule.spec, torch.Generator().manual_seed(0), 1, 5, "random", 16, 16)
        inputs = {name: x.float() for name, x in inputs.items()}
        call = compare.whole(spec.chunk, impl="triton")
        now = rule, rule.chunk
        call(inputs) if "gradients" in spec.skip else compare.differentiate(call, inputs)
        now = rule, rule.step
        if rule.step:
            steps.by_steps(spec, inputs)
    for (_, engine), kernels in launched.items():
        others = [(other, engine) for other in targets.RULES if other.covers and engine in (other.chunk, other.step)]
        assert kernels - {"top"} and kernels - {"top"} <= set().union(*(launched[other] for other in others))
