"""needlework's models inside vLLM give what `generate` gives, token for token: every kind of layer, and every way that vLLM cuts, evicts
and shares a sequence. `.ci/vllm` runs it in an environment with vLLM, which the other tests do without.

    python tests/serve/vllm_arms.py [MODEL …]
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from needlework.layers import (
    CCQ,
    Alibi,
    Attention,
    Canon,
    Carve,
    ChannelGate,
    Comba,
    Delta,
    DeltaProduct,
    Differential,
    FixedGate,
    Fox,
    GatedConv,
    GatedNorm,
    Gdn2,
    HalfRope,
    HeadNorm,
    Hedgehog,
    Linear,
    Llama3Rope,
    Longhorn,
    LowRankGate,
    Lucid,
    LucidPath,
    Mamba,
    Mamba2,
    Mamba3,
    Memory,
    OutputGate,
    PairRope,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    Rwkv7,
    ShortConv,
    Silu,
    Softmax,
    SSMax,
    SwiGLU,
)
from needlework.layers import (
    Path as PathAttention,
)
from needlework.layers.config import MixerConfig
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM

VOCABULARY, LENGTH, NEW = 128, 384, 40
PROMPTS = (5, 37, 100, 1, 64, 200, 17, 130, 33, 2, 1, 300)  # tokens of each
PAGE, FEW = 16, 12
HEADERS = {"Content-Type": "application/json"}
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": LENGTH,
    "seed": 0,
}
# one process, whose scheduler and counts can be asked; a cache of 1 GB; threads as OMP_NUM_THREADS says
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

rule = lambda write, **more: Recurrent(heads=2, key_dim=16, value_dim=16, write=write, **more)
attention = lambda attend, **more: Attention(heads=4, kv_heads=2, head_dim=16, attend=attend, **{"position": Rope()} | more)

MODELS: dict[str, tuple[str, dict[str, MixerConfig]]] = {
    # no layer grows
    "recurrent": (
        "QCDNLGRAHPOXWKM23",
        {
            "Q": rule(QDelta(), read=CCQ()), "C": rule(Carve(content_chunk=8)), "D": rule(Delta()), "N": rule(Gdn2()),
            "L": rule(Linear(), conv=None), "G": GatedConv(),
            "R": rule(Linear(gate=FixedGate()), position=PairRope(), conv=None, norm=HeadNorm(weight=False)), "A": rule(Linear(gate=LowRankGate(rank=4)), conv=Silu()),
            "H": rule(Linear(features=Hedgehog(), normalise=True), conv=None), "P": rule(DeltaProduct()), "O": rule(Comba()), "X": rule(Longhorn()),
            "W": rule(Rwkv7(rank=4), conv=None), "K": rule(Delta(gate=ChannelGate()), output_gate=OutputGate()), "M": Mamba(channels=32, state=8),
            "2": Recurrent(heads=1, value_heads=4, key_dim=16, value_dim=16, write=Mamba2(), conv=ShortConv(bias=True), norm=GatedNorm()),
            "3": Mamba3(heads=2, key_dim=16, value_dim=16),
        },
    ),
    # every layer grows, and none has a slot
    "attention": (
        "SWLBDP",
        {
            "S": attention(Softmax()), "W": attention(Softmax(window=24), position=HalfRope()), "L": attention(Lucid()),
            "B": attention(Lucid(window=48, solve="global", precondition="beta")), "D": attention(Differential()),
            "P": attention(Polar(window=40), qk_norm=True),
        },
    ),
    # other scores; FoX has a slot beside its pages
    "scores": (
        "MAFL",
        {
            "M": attention(SSMax(), qk_norm=True), "A": attention(Alibi(), position=None), "F": attention(Fox(), position=None, conv=Canon()),
            "L": attention(Softmax(), position=Llama3Rope(length=64)),
        },
    ),
    # some of each, and layers with both
    "mixed": (
        "QGMPGSL",
        {
            "Q": Recurrent(heads=4, key_dim=32, value_dim=64, write=QDelta(), read=CCQ()), "G": GatedConv(), "M": attention(Lucid(window=48), memory=Memory()),
            "P": attention(Polar(), qk_norm=True, conv=Canon(), memory=Memory(), position=None),
            "S": Attention(heads=2, head_dim=32, attend=Softmax(), position=Rope()), "L": attention(Lucid(precondition="rowmax")),
        },
    ),
    # pages that are written again: no two sequences may share one
    "rewriting": (
        "HWLQ",
        {
            "L": attention(LucidPath(rank=4, conv=3), position=None),
            "H": attention(PathAttention(rank=4), position=None), "W": attention(PathAttention(window=24, rank=None, conv=None), position=None),
            "Q": rule(QDelta()),
        },
    ),
}  # fmt: skip

# Pages, or slots, that are too few for all requests at once, which would otherwise be a memory's worth.
SCARCE = {"recurrent": 9, "attention": 40, "scores": 64, "mixed": 12, "rewriting": 16}

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prefill": {"max_num_batched_tokens": 48},
    "preemption": {"scarce": True},
    "prefix caching": {"enable_prefix_caching": True},  # requests that begin alike come in one step
    "prefix caching, chunked prefill, preemption": {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 48,
        "scarce": True,
    },
}


def make(name: str, folder: Path) -> NeedleworkForCausalLM:
    """The model in `folder`, with weights that make its layers matter: what starts as nothing starts as something."""
    layout, mixers = MODELS[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "mlp": SwiGLU(hidden=64), "initializer_range": 0.2, "softcap": 8.0}
    model = NeedleworkForCausalLM(NeedleworkConfig(layout=layout, mixers=mixers, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    """Random ones, then two that begin as the longest does."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPTS]
    return [*found, [*found[-1], 7, 8, 9], [*found[-1][:250], *range(20, 40)]]


def answered(model: NeedleworkForCausalLM, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Prompts, each with what `generate` makes of it alone."""

    def alone(prompt: list[int]) -> list[int]:
        return model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()

    return [(prompt, alone(prompt)) for prompt in prompts]


def other(prompt: list[int], got: list[int], wanted: list[int]) -> str:
    at = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), len(got))
    return f"prompt of {len(prompt)} tokens: token {at} is another than generate's"


def arm(name: str, folder: Path, wanted: list[tuple[list[int], list[int]]], scarce: bool = False, **options: Any) -> list[str]:
    """What is wrong with the model's answers under these options of vLLM's."""
    from vllm import LLM, SamplingParams

    if scarce:
        options["num_gpu_blocks_override"] = SCARCE[name]
    options = {"enable_prefix_caching": False, "max_num_seqs": 8} | options
    engine = LLM(str(folder), block_size=PAGE, disable_log_stats=False, **COMMON, **options)
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in wanted], greedy, use_tqdm=False)
    preempted = sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")
    shared = sum(answer.num_cached_tokens for answer in answers)
    pairs = [(list(answer.outputs[0].token_ids), *asked) for answer, asked in zip(answers, wanted, strict=True)]
    wrong = [other(prompt, got, tokens) for got, prompt, tokens in pairs if got != tokens]
    if options["enable_prefix_caching"] and not shared:
        wrong.append("no request began with what another had read")
    # a slot does not grow: without snapshots nothing is short; nor is it for prompts of one token
    if scarce and not preempted and len(wanted) > FEW and (name != "recurrent" or options["enable_prefix_caching"]):
        wrong.append("no request was preempted")
    print(f"  {len(wanted)} requests, {shared} prompt tokens shared, {preempted} preemptions", flush=True)
    return wrong


def refusals(folder: Path) -> list[str]:
    """What vLLM says where it would serve these models wrongly, before it serves. A process each: vLLM remembers what it has refused."""
    cases = (
        ({"kv_cache_dtype": "fp8"}, None, "kv_cache_dtype: got fp8, expected auto"),
        ({}, "0.1.0", "needlework serves inside vLLM 0.1.0, and this is"),
    )
    return [line for case in cases for line in refused(folder, *case)]


def refused(folder: Path, option: dict[str, Any], version: str | None, expected: str) -> list[str]:
    code = f"import needlework.serve.vllm as plugin; plugin.VERSION = {version!r} or plugin.VERSION; from vllm import LLM; "
    code += f"LLM({str(folder)!r}, **{COMMON | {name: x for name, x in option.items() if name != 'scarce'}})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    right = ended.returncode and expected in ended.stderr
    return [] if right else [f"{option} with {version}: ended with {ended.returncode}, expected {expected!r}"]


def replicas(folder: Path, wanted: list[tuple[list[int], list[int]]]) -> list[str]:
    """The server with two replicas, over HTTP, every prompt at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {name.replace("_", "-"): value for name, value in COMMON.items()}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={folder}",
        "--served-model-name=it",
        *words,
    ]
    server = subprocess.Popen(
        [*command, f"--port={port}", f"--block-size={PAGE}", "--max-num-seqs=8", "--data-parallel-size=2"]
    )

    def ask(prompt: list[int]) -> list[int]:
        asked = {
            "model": "it",
            "prompt": prompt,
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), HEADERS)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None:
                    return [f"the server ended with {server.returncode}"]
                time.sleep(1)
        with ThreadPoolExecutor(len(wanted)) as clients:
            answers = list(clients.map(ask, [prompt for prompt, _ in wanted]))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as metrics:
            lines = [line for line in metrics.read().decode().splitlines() if line.startswith("vllm:request_success_total")]
    finally:
        server.terminate()
        server.wait()
    busy = {re.search('engine="(.)"', line)[1] for line in lines if float(line.split()[-1])}
    print(f"  {len(answers)} requests to replicas {', '.join(sorted(busy))}", flush=True)
    wrong = [other(prompt, got, tokens) for got, (prompt, tokens) in zip(answers, wanted, strict=True) if got != tokens]
    return wrong if len(busy) == 2 else [*wrong, "one replica answered all"]


def main(models: list[str]) -> None:
    failed, answers = 0, {}

    def told(what: str, wrong: list[str], since: float) -> None:
        nonlocal failed
        failed += bool(wrong)
        print("\n".join([f"{'FAILED' if wrong else 'equal'}: {what}, {time.time() - since:.0f} s", *wrong]), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for name in models or MODELS:
            path = Path(folder) / name
            model = make(name, path)
            answers[name] = wanted = answered(model, prompts())
            one = answered(model, [[token] for token in range(1, FEW + 1)])
            for label, options in ARMS.items():
                since = time.time()
                if name == "rewriting" and options.get("enable_prefix_caching"):
                    told(f"{name}, {label} is refused", refused(path, options, None, "enable_prefix_caching: got True"), since)
                    continue
                told(f"{name}, {label}", arm(name, path, wanted, **options), since)
            since = time.time()
            # slots and pages that others have left: what lies in them is not theirs
            told(f"{name}, prompts of one token", arm(name, path, one, scarce=True, max_num_seqs=4), since)
        path = Path(folder) / (models or [*MODELS])[0]
        since = time.time()
        told("what is refused", refusals(path), since)
        since = time.time()
        told("two replicas", replicas(path, answers[path.name]), since)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
