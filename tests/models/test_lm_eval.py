"""lm-evaluation-harness, a program of its own, measures a checkpoint's folder: each number is the model's, computed here."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import needlework
from needlework.data import byte_tokenizer, eot_id
from needlework.layers import Attention, Polar, QDelta, Recurrent, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, save_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'lm-eval>=0.4.13'"),
]  # fmt: skip
MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
    "P": Attention(heads=2, head_dim=8, attend=Polar()),
}
ROWS = [
    {"q": "1+2=", "choices": ["3", "4 or so"], "text": "one and two is three"},
    {"q": "the first letter:", "choices": ["α", "b", "cc"], "text": "α, β and γ\n" * 3},
    {"q": "x", "choices": ["y", "z"], "text": "x"},
]
COMMON = """\
task: local_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {name}
"""
TASKS = {
    "multiple_choice": 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: 0\ntarget_delimiter: ""\n'
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "generate_until": 'doc_to_text: "{{q}}"\ndoc_to_target: "{{choices[0]}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}\n'
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
    "loglikelihood_rolling": 'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list: [{metric: byte_perplexity}]\n',
}


def make():
    torch.manual_seed(0)
    config = NeedleworkConfig(hidden_size=16, layout="QP", mixers=MIXERS, mlp=SwiGLU(hidden=24), initializer_range=0.4)
    return NeedleworkForCausalLM(config).eval()


def log_likelihood(model, before, text):
    """Of the text's bytes after the ids `before`."""
    ids = torch.tensor([[*before, *text.encode()]])
    log_p = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    return log_p[len(before) - 1 :].sum().item()


def continued(model, text, n):
    """The likeliest n bytes after the text, up to a new line or the end of text."""
    ids, made = [*text.encode()], []
    while len(made) < n and not {10, 256} & set(made):
        made.append(model(torch.tensor([ids + made])).logits[0, -1].argmax().item())
    return bytes(b for b in made if b not in (10, 256)).decode("utf-8", "replace")


@torch.no_grad()
def test_all_three_kinds_of_task_give_the_models_numbers(tmp_path):
    model, tokenizer = make(), byte_tokenizer()
    save_checkpoint(model, tokenizer, eot_id(tokenizer), tmp_path / "checkpoint")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(COMMON.format(name=name, data=tmp_path / "rows.jsonl") + task)
    path = os.pathsep.join([str(Path(needlework.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": path}
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "4",
        "--model_args", f"pretrained={tmp_path / 'checkpoint'},trust_remote_code=True",
        "--tasks", ",".join(f"local_{name}" for name in TASKS), "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | offline)
    assert run.returncode == 0, run.stderr
    samples = {
        name: [json.loads(line) for line in next((tmp_path / "out").rglob(f"samples_local_{name}_*.jsonl")).open()]
        for name in TASKS
    }
    for name, found in samples.items():
        assert len(found) == len(ROWS), name
        for sample in found:
            row, told = sample["doc"], sample["resps"]
            match name:
                case "multiple_choice":
                    expected = [log_likelihood(model, row["q"].encode(), choice) for choice in row["choices"]]
                    assert [float(one[0][0]) for one in told] == pytest.approx(expected, rel=1e-4)
                case "generate_until":
                    assert told[0][0] == continued(model, row["q"], 6)
                case "loglikelihood_rolling":
                    assert float(told[0][0]) == pytest.approx(log_likelihood(model, [256], row["text"]), rel=1e-4)
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]
    total = sum(log_likelihood(model, [256], row["text"]) for row in ROWS)
    perplexity = math.exp(-total / sum(len(row["text"].encode()) for row in ROWS))
    assert results["local_loglikelihood_rolling"]["byte_perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
