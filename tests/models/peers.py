"""Tiny models of flash-linear-attention with weights that follow from their names, so that a file of config, shapes and logits is the
model.

`TRITON_INTERPRET=1 python tests/models/peers.py [KIND …]`, where flash-linear-attention 0.6.0 is installed, rewrites tests/models/fla/: its
kernels run in Triton's interpreter, without the search for launch configs, which asks for a GPU.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock
from zlib import crc32

import numpy as np
import torch

FOLDER = Path(__file__).parent / "fla"
VOCABULARY, TOKENS, SHOWN = 61, 24, (0, 1, 9, 23)  # logits at four positions are in the file
COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, fuse_norm=False, fuse_cross_entropy=False)
WITH_MLP = COMMON | dict(intermediate_size=48, fuse_swiglu=False)
DELTA = {
    "delta_net": ("DeltaNet", WITH_MLP | dict(num_heads=2)),
    "gated_deltanet": ("GatedDeltaNet", WITH_MLP | dict(num_heads=2, num_v_heads=4, head_dim=16, expand_v=1.5)),
    "kda": ("KDA", WITH_MLP | dict(num_heads=2, num_v_heads=4, head_dim=16, expand_v=0.5)),
}
MODELS = {
    "gla": ("GLA", WITH_MLP | dict(num_heads=2)),
    "retnet": ("RetNet", WITH_MLP | dict(num_heads=2)),
    # one group: with several its loop on a CPU gives a head another group than its kernels do
    "mamba2_fla": ("Mamba2", COMMON | dict(head_dim=16, state_size=8)),
    # 24 tokens are one block: between blocks its kernels round the reflections to float16, and are 4e-4 off its own reference
    "path_attn": ("PaTHAttention", WITH_MLP | dict(num_heads=2)),
    "path_attn_grouped": (
        "PaTHAttention",
        WITH_MLP | dict(num_heads=2, num_kv_heads=1, use_low_rank_w=False, use_w_shortconv=False),
    ),
    **DELTA,
    **{f"{kind}_negative": (name, own | dict(allow_neg_eigval=True)) for kind, (name, own) in DELTA.items()},
}


def filled(name, shape):
    """A tensor's numbers, of its name alone: numpy keeps RandomState's stream for ever. Norms are near 1, steps near softplus(−3)."""
    x = np.random.RandomState(crc32(name.encode())).randn(*shape) * 0.25
    start = 1.0 if name.endswith("norm.weight") else -3.0 if name.endswith("dt_bias") else 0.0
    return torch.from_numpy(x + start).float()


def tokens():
    return torch.from_numpy(np.random.RandomState(0).randint(VOCABULARY, size=(1, TOKENS)))


def peer(kind):
    """flash-linear-attention's model, its weights filled."""
    import fla.models

    name, own = MODELS[kind]
    config = getattr(fla.models, f"{name}Config")(**own)
    model = getattr(fla.models, f"{name}ForCausalLM")(config).eval()
    model.load_state_dict({name: filled(name, x.shape) for name, x in model.state_dict().items()})
    return model


@torch.no_grad()
def logits(model):
    """Of its own code, each kernel with the first of its launch configs."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def first(self, *arguments, **options):
        self.configs = self.configs[:1]
        return run(self, *arguments, **options)

    with mock.patch.object(Autotuner, "run", first):
        return model(tokens(), use_cache=False).logits


def fla_version():
    return version("flash-linear-attention")


def write():
    for kind in sys.argv[1:] or MODELS:
        model = peer(kind)
        shown = logits(model)[0, list(SHOWN)]
        file = {
            "fla": fla_version(),
            "config": json.loads(model.config.to_json_string(use_diff=False)),
            "tensors": {name: [*x.shape] for name, x in model.state_dict().items()},
            "logits": [[float(f"{z:.8g}") for z in row] for row in shown.tolist()],
        }
        (FOLDER / f"{kind}.json").write_text(json.dumps(file) + "\n")
        print(kind, shown.abs().max().item())


if __name__ == "__main__":
    write()
