"""Needles in the manner of RULER: the answers stand in the prompt, and they are what is scored."""

import re
from dataclasses import replace

import pytest
import torch

from needlework.data import MULTI_KEY, MULTI_NEEDLE, NUMBER, PASSKEY, UUID, Ruler, decode_bytes


@pytest.mark.parametrize("task", [PASSKEY, NUMBER, UUID, MULTI_KEY, MULTI_NEEDLE])
def test_ruler_answers_stand_in_the_prompt_and_are_what_is_scored(corpus, task):
    result = task.episodes(corpus, 0, 6, 900)
    assert result.episodes.input_ids.shape == (6, 900)
    inputs, targets = result.episodes
    assert torch.equal(inputs[:, 1:][targets[:, :-1] >= 0], targets[:, :-1][targets[:, :-1] >= 0])
    for row, prompt, answers in zip(range(6), result.prompts, result.answers, strict=True):
        text = decode_bytes(prompt).decode()
        sentences = dict(re.findall(r" The locker number of (\S+) is ([0-9a-f-]+)\.", text))
        asked = re.findall(r"[a-z]+-[a-z]+", text[text.rindex(" What ") : text.rindex("?")])
        assert len(sentences) == task.needles
        assert tuple(sentences[key] for key in asked) == answers
        scored = decode_bytes(targets[row][targets[row] >= 0]).decode()
        assert scored == "".join(f" {answer}" for answer in answers)
        assert torch.equal(inputs[row, : len(prompt)], prompt)


def test_ruler_is_a_function_of_its_seed(corpus):
    a, b, c = (MULTI_KEY.episodes(corpus, seed, 3, 700).episodes.input_ids for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_ruler_noise_is_cut_between_repetitions(corpus):
    for prompt in PASSKEY.episodes(corpus, 0, 4, 900).prompts:
        text = decode_bytes(prompt).decode()
        before = text[: text.index(" The locker")]
        assert before == "" or before.endswith("in a hurry today.")


def test_a_ruler_task_that_does_not_fit_or_does_not_exist_is_refused(corpus):
    with pytest.raises(ValueError, match="too short by"):
        MULTI_NEEDLE.episodes(corpus, 0, 1, 300)
    with pytest.raises(ValueError, match="1 <= asked <= needles"):
        Ruler(needles=2, asked=3)
    with pytest.raises(ValueError, match="ruler: values is 'word', expected 'number' or 'uuid'"):
        replace(NUMBER, values="word")
    with pytest.raises(ValueError, match="ruler: haystack is 'essays', expected 'noise' or 'text'"):
        replace(NUMBER, haystack="essays")
