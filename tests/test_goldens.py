"""What must not change unnoticed, for each mixer of the demo: the loss of 20 steps of a tiny model, the names and shapes of
its weights, and config.json. `python tests/test_goldens.py` rewrites tests/goldens/ from the code as it is: after a change
that is meant to change them, run it and say in the commit why.

Everything is float64 from the first random number on: another machine, number of threads or order of a sum moves a loss by
1e-11 at most, a change of a formula by more than the 1e-9 that is asked for.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from needlework.layers import SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig
from needlework.recipes.demo import COMPARE

GOLDENS = Path(__file__).parent / "goldens"
SIZES = Sizes(heads=2, key_dim=8, value_dim=12, attention_heads=4, kv_heads=2, head_dim=8, half_life=32.0, content_chunk=8)
VOCABULARY, STEPS, BATCH, LENGTH = 31, 20, 2, 27  # 27 tokens: three of CARVE's content chunks and a part of one


def config(mixer):
    return NeedleworkConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        layout="MM",
        mixers={"M": CATALOG[mixer].make(SIZES)},
        mlp=SwiGLU(hidden=24),
        initializer_range=0.25,
    )


def build(mixer):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(mixer), dtype=torch.float64).train()


def losses(mixer):
    model = build(mixer)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=False)
    found = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        logits = model(tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())  # the model's own loss rounds to float32
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


def weights(mixer):
    return {name: " ".join(map(str, x.shape)) for name, x in build(mixer).state_dict().items()}


def written(mixer):
    """config.json's content but for the version of the library that wrote it."""
    data = config(mixer).to_diff_dict()
    del data["transformers_version"]
    return json.loads(json.dumps(data))


def golden(mixer):
    return json.loads((GOLDENS / f"{mixer}.json").read_text())


@pytest.mark.parametrize("mixer", COMPARE)
def test_twenty_steps_lose_what_they_lost(mixer):
    assert losses(mixer) == pytest.approx(golden(mixer)["losses"], rel=1e-9, abs=0)


@pytest.mark.parametrize("mixer", COMPARE)
def test_weights_keep_their_names_and_shapes(mixer):
    assert weights(mixer) == golden(mixer)["weights"]


@pytest.mark.parametrize("mixer", COMPARE)
def test_a_config_is_written_as_it_was(mixer):
    assert written(mixer) == golden(mixer)["config"]


def test_every_golden_is_of_a_mixer_of_the_demo():
    assert {path.stem for path in GOLDENS.iterdir()} == set(COMPARE)


def write():
    GOLDENS.mkdir(exist_ok=True)
    for mixer in COMPARE:
        found = {"losses": losses(mixer), "weights": weights(mixer), "config": written(mixer)}
        (GOLDENS / f"{mixer}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()
