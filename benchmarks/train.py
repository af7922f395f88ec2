"""Training steps of whole models on this GPU: tokens per second, MFU, peak memory, by mixer and length at equal tokens a batch.

    python benchmarks/train.py [--size 125m 1.3b] [--only qdelta carve] [--lengths 2048 65536] [--impl needlework fla] [--out DIR]

A step is forward, backward, clip and AdamW on TOKENS tokens through the library's own training code: blocks compiled, bfloat16
autocast, float32 weights. Rows: mixer, impl ("needlework" | "fla"), size, parameters, shape {B, T}, ms, tokens_per_second,
mfu, bar, peak_mib, compiled, recompute, device, torch, triton, commit; kept by key, one file a device.

    MFU = (6 N + Σ 12 n Hq d) tokens/s / 989e12     N: parameters, without the embedding's rows but with the unembedding; Σ over the
                                                    layers that attend, to n keys a query: T/2, behind a window W − W²/2T;
                                                    recurrent states count nothing
"""

import argparse
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import results
from timing import median
from train_peers import PEERS, Mixer

from needlework.models import NeedleworkForCausalLM
from needlework.recipes.comparison import LARGE, MEDIUM, MIXERS, SMALL, Size, model, recipe
from needlework.train import AdamW, Cosine, TrainConfig
from needlework.train.guard import FINITE
from needlework.train.losses import Piece, backward
from needlework.train.shard import prepare
from needlework.train.update import Numbers, Update
from needlework.train.world import World

SIZES = {"60m": SMALL, "125m": MEDIUM, "1.3b": LARGE}
TOKENS = 131_072  # so many that what a step costs beside its tokens (the optimiser, the host, CARVE's launches) is little
PEAK = 989e12  # H100 and H200, dense bfloat16
LENGTHS = tuple(2048 << n for n in range(6))
SHORT = LENGTHS[0]
# MFU at 125M parameters and T 2048
BARS = {"softmax": 0.48, "gated-deltanet": 0.42, "qdelta": 0.4, "carve": 0.36, "polar-memory": 0.38}
LARGE_BAR = 0.42  # of every mixer at 1.3B and T 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="*", choices=SIZES, default=["125m"])
    parser.add_argument("--only", nargs="*", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument(
        "--impl", nargs="*", choices=("needlework", "fla"), default=["needlework"], help="fla: its layers, where one exists"
    )
    parser.add_argument("--out", type=Path, default=results.ROOT / "training")
    given = parser.parse_args()
    import triton

    device = torch.cuda.get_device_name()
    common = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "commit": _commit()}
    file, failed = results.path(device, given.out), 0
    for name, mixer, impl, T in product(given.size, given.only, given.impl, given.lengths):
        if impl == "fla" and mixer not in PEERS:
            continue
        row = {
            "op": mixer,
            "impl": impl,
            "dtype": "bfloat16",
            "pass": f"step {name} {impl}",
            "shape": {"B": TOKENS // T, "T": T},
            "bar": bar(mixer, name) if (T, impl) == (SHORT, "needlework") else None,
        }
        try:
            row |= step(mixer, SIZES[name], T, impl) | {"size": name} | common
        except Exception as error:  # the other rows are still to be measured
            failed += 1
            print(f"{mixer} {impl} {name} T {T}: {type(error).__name__}: {error}", flush=True)
            continue
        results.put(file, row)
        print(
            f"{mixer:20} {impl:10} {name:5} T {T:6,}: {row['tokens_per_second']:12,.0f} tokens/s, MFU {row['mfu']:.1%}, "
            f"{row['ms']:.1f} ms, {row['peak_mib']:,.0f} MiB", flush=True,
        )  # fmt: skip
    return 1 if failed else 0


def bar(mixer: str, size: str) -> float | None:
    """MFU that a mixer is to reach at SHORT tokens a row."""
    return LARGE_BAR if size == "1.3b" else BARS.get(mixer) if size == "125m" else None


def step(mixer: str, size: Size, T: int, impl: str) -> dict:
    """One row's figures: the median of the steps after two that compile and allocate."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    config = model(mixer, size)
    net = NeedleworkForCausalLM(config)
    if impl == "fla":
        for block in net.model.blocks:
            block.mixer = Mixer(PEERS[mixer](size))
    net.cuda().train()
    recompute = size is LARGE
    # their layers break the graph: they run as they do for their users, without torch.compile
    settings = TrainConfig(
        steps=1, seed=0, optim=AdamW(lr=1e-4), schedule=Cosine(), autocast="bf16", checkpoint_every=1,
        compile=impl == "needlework", recompute=recompute,
    )  # fmt: skip
    world = World()
    prepare(net, settings, world)
    update = Update(settings.optim.build(net.named_parameters()), settings.clip)
    ids = torch.randint(config.vocab_size, (TOKENS // T, T), device="cuda")
    piece, losses = Piece(ids, ids.roll(-1, 1)), recipe(mixer).losses

    def once() -> None:
        numbers = Numbers(net, backward(net, losses, [piece], TOKENS, 1, "bf16"), world)
        update.begin(numbers, FINITE)
        update.finish(numbers.read().norm)  # the training loop's one wait a step
        net.zero_grad()

    for _ in range(2):
        once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ms = median(once, warmup=200, rep=1500)
    speed = TOKENS / (ms * 1e-3)
    counted = net.num_parameters()  # tied: the embedding's rows are the unembedding's
    attending = [config.mixers[letter] for letter in config.layout if config.mixers[letter]["kind"] == "attention"]
    operations = 6 * counted + sum(12 * keys(T, m["attend"].get("window")) * m["heads"] * m["head_dim"] for m in attending)
    return {
        "parameters": counted,
        "ms": ms,
        "tokens_per_second": speed,
        "mfu": operations * speed / PEAK,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
        "compiled": settings.compile,
        "recompute": recompute,
    }


def keys(T: int, window: int | None) -> float:
    """That a query sees in the mean."""
    W = min(T, window or T)
    return W - W**2 / (2 * T)


def _commit() -> str:
    if given := os.environ.get("COMMIT"):
        return given
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
