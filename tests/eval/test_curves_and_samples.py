"""What a training's log leaves in the results, and how a model goes on from a prompt."""

import json
import math

import pytest
import torch

from needlework.eval.samples import samples
from needlework.report.curves import MOST, curves


def log(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(step, **changes):
    return {"step": step, "loss": 1.0, "lr": 0.001 * step, "grad_norm": float(step), "memory": 100 + step} | changes


def test_a_short_log_is_kept_step_by_step(tmp_path):
    assert curves(log(tmp_path / "log.jsonl", line(1), line(2))) == {
        "steps": [1, 2], "lr": [0.001, 0.002], "grad_norm": [1.0, 2.0], "memory": [101, 102],
    }  # fmt: skip


def test_a_long_log_is_told_in_stretches_that_end_with_the_last_step(tmp_path):
    kept = curves(log(tmp_path / "log.jsonl", *map(line, range(1, 131))))
    assert len(kept["steps"]) == 44 <= MOST and kept["steps"][:2] == [3, 6] and kept["steps"][-1] == 130
    assert kept["grad_norm"][0] == 2.0 and kept["lr"][0] == 0.003 and kept["memory"][-1] == 230


def test_notes_and_steps_without_a_gradient_are_left_out(tmp_path):
    kept = curves(
        log(tmp_path / "log.jsonl", {"step": 0, "note": "2 ranks now"}, line(1, grad_norm=None), line(2, grad_norm=math.pi))
    )
    assert kept["steps"] == [2] and kept["grad_norm"] == [3.14]
    assert curves(log(tmp_path / "log.jsonl", line(1, lr=None))) is None and curves(tmp_path / "none.jsonl") is None


class Counting(torch.nn.Module):
    """Says the next number after the last one, modulo 10."""

    def forward(self, ids):
        return torch.nn.functional.one_hot((ids + 1) % 10, 10).float()


def test_a_sample_is_the_likeliest_token_after_token():
    told = samples(Counting(), torch.tensor([[3, 4, 0, 0, 0], [8, 9, 9, 9, 9]]), 2, lambda ids: "".join(map(str, ids)))
    assert told == [
        {"prompt": "34", "continuation": "567", "text": "000"},
        {"prompt": "89", "continuation": "012", "text": "999"},
    ]


@pytest.mark.parametrize("prompt", [0, 5])
def test_a_prompt_that_leaves_nothing_is_refused(prompt):
    with pytest.raises(ValueError, match=f"prompt is {prompt} tokens of rows of 5"):
        samples(Counting(), torch.zeros(1, 5, dtype=torch.long), prompt, str)
