"""Layers compiled for prompts, their kernels in Triton's interpreter: one graph for any number of tokens, with the layer's own results."""

import os
from array import array
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.models.block import Residual
from needlework.serve.batch import Inputs, Shape
from needlework.serve.compiled import compiled
from needlework.serve.graphs import alone
from needlework.serve.planner import plan
from needlework.serve.request import Request
from needlework.serve.runner import Runner
from needlework.serve.step import Prefill
from needlework.serve.tables import Tables
from tests.models.test_table_cache import MIXERS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
KINDS = {letter: mixer for letter, mixer in MIXERS.items() if letter != "M"}  # of Mamba-3's MIMO no prompt is captured


@pytest.mark.slow
@pytest.mark.parametrize("letter", KINDS)
def test_a_prompts_layer_is_one_graph_for_any_number_of_tokens(letter, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    torch.manual_seed(0)
    model = NeedleworkForCausalLM(
        NeedleworkConfig(vocab_size=257, hidden_size=32, layout=letter, mixers={letter: MIXERS[letter]})
    )
    held, (block,) = model.model.held(), model.model.blocks
    assert all(one.captured == "all" for one in held)
    config = plan(held, vocabulary=257, memory=1 << 30, weights=0, peak=0, graphs=0, length=512, batch=2, budget=256)
    runner = Runner(model.eval(), Tables(held, config, model.device), config)
    torch._dynamo.reset()
    counters.clear()
    layer, tables = compiled("aot_eager").layer, runner.tables
    for T in (64, 128, 192):
        inputs = Inputs.empty(Shape(0, 2, T, 1, runner.pages))
        lines = {window: array("i", range(n)) for window, n in runner.pages}
        prompt = Prefill(Request(id="one", prompt=(1,), max_tokens=1), 0, 0, tuple(range(T - 9)), True, lines)
        runner.seeds["one"] = 0
        step = alone(prompt, T)
        runner.holders.hear(step, runner.seeds)
        runner.holders.fill(inputs, step)
        found = []
        for own in (partial(layer, block), block.serve):
            for table in (tables.slots, *tables.pages.values()):
                table.zero_()
            with torch.no_grad():
                y = own(Residual(model.model.embed(inputs.named["ids"])), tables.layers[0], inputs.batch)
            found.append({"y": y.whole()[: T - 9]} | {name: x.clone() for name, x in tables.layers[0].items()})
        assert found[0]["y"].abs().sum() > 0
        for name, x in found[1].items():
            torch.testing.assert_close(found[0][name], x, rtol=1e-5, atol=1e-5, msg=name)
    assert counters["stats"]["unique_graphs"] == 1
