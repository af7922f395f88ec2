"""The plain PyTorch path on a CUDA device is the CPU's: ops with their gradients, mixers with their states; and what the kernels'
interpreter cannot show of large states. Skipped without one."""

import dataclasses
from functools import partial

import pytest
import torch

from needlework.ops.qdelta.spec import growing
from needlework.ops.specs import specs
from needlework.testing.checks import budgeted
from needlework.testing.compare import assert_close, differentiate, leaves, make, outputs, tokens, whole
from needlework.testing.errors import assert_within_budget
from tests.layers.test_mixers import CONFIGS, build, close, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
PACKED = torch.tensor([0, 19, 19, 83])


def on(device, tensors):
    return {name: x.to(device) for name, x in tensors.items()}


@pytest.mark.parametrize("settings", [{}, {"cu_seqlens": PACKED}], ids=["batch", "packed"])
@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_an_op_on_the_gpu_is_the_op_on_the_cpu(spec, settings):
    inputs = make(spec, 1 if settings else 2, 83)
    here = differentiate(whole(spec.chunk, **settings), inputs)
    there = differentiate(whole(spec.chunk, **on("cuda", settings)), on("cuda", inputs))
    for a, b in zip(there, here, strict=True):
        assert_close(on("cpu", a), b, "on the GPU")


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_a_step_on_the_gpu_is_prefill_on_the_cpu(spec):
    if "step_is_prefill" in spec.skip:
        pytest.skip(spec.skip["step_is_prefill"])
    inputs = make(spec, 2, 5)
    expected = outputs(whole(spec.chunk)(inputs))
    table = spec.table(3)
    table = table.cuda() if isinstance(table, torch.Tensor) else type(table)(*(x.cuda() for x in table))
    for t in range(5):
        result = spec.step(
            **on("cuda", tokens(spec, inputs, lambda x, t=t: x[:, t])), state=table, slots=torch.tensor([2, 0], device="cuda")
        )
        got = dict(leaves(result if isinstance(result, tuple) else (result,))).values()
        for (name, want), x in zip(expected.items(), got, strict=True):
            assert_close({name: x.cpu()}, {name: want[:, t]}, f"token {t}")


@pytest.mark.parametrize("K, V", ((128, 256), (256, 512)))
def test_a_state_past_what_float16_holds_is_within_its_budget(K, V):
    spec = next(spec for spec in specs() if spec.name == "qdelta")
    spec = dataclasses.replace(spec, inputs=partial(growing, H=2, HV=4, K=K, V=V))
    assert_within_budget(budgeted(spec, torch.bfloat16, 1, 256, "random", torch.device("cuda")))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixer_on_the_gpu_is_the_mixer_on_the_cpu(name):
    mixer, x = build(CONFIGS[name]), sample(37)
    y, _ = mixer(x)
    mixer = mixer.cuda()
    first, state = mixer(x[:, :20].cuda(), output_final_state=True)
    second, _ = mixer(x[:, 20:].cuda(), state)
    assert close(torch.cat([first, second], 1).cpu(), y)
