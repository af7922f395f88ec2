"""Layers compiled for decoding: the answers are those of `generate`, and what is compiled serves any number of rows."""

import pytest
import torch
from torch._dynamo.utils import counters

from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.serve.compiled import compiled
from tests.models.test_table_cache import MIXERS, V

from .serving import Serving, generated, requests


@pytest.mark.slow
def test_compiled_layers_answer_as_generate_and_do_not_compile_for_each_number_of_rows_or_slots():
    kinds = {letter: mixer for letter, mixer in MIXERS.items() if letter != "C"}  # CARVE's step in PyTorch reads a value back
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=V, hidden_size=32, layout="".join(kinds) * 2, mixers=kinds)
    model = NeedleworkForCausalLM(config).double().eval()
    asked = requests(8)
    torch._dynamo.reset()
    counters.clear()
    passes = compiled("aot_eager")
    with Serving(model) as serving:
        serving.runner.passes = passes
        found = serving.answers(asked)
        alone = serving.answers(requests(1, seed=2, answers=(5,)))
    assert found == generated(model, asked)
    assert alone == generated(model, requests(1, seed=2, answers=(5,)))
    assert counters["stats"]["unique_graphs"] < 3 * len(kinds)  # one row, and many; six numbers of rows were decoded
    graphs = counters["stats"]["unique_graphs"]
    with Serving(
        model, memory=4_000_000, snapshots=3
    ) as larger:  # as a server's tables are larger than those its costs are measured on
        assert larger.config.slots > serving.config.slots
        larger.runner.passes = passes
        assert larger.answers(asked) == found
    assert counters["stats"]["unique_graphs"] == graphs
