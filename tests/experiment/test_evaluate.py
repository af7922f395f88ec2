"""What is measured of a model: which keys, at which lengths, and that the rows are what they claim to be."""

from types import SimpleNamespace

import pytest
import torch

from needlework.data import byte_tokenizer, load_corpus
from needlework.data.tokenizer import decode_bytes
from needlework.experiment.diagnoses import needle_in_text
from needlework.experiment.evaluate import Evaluation, measure
from needlework.experiment.reader import at_once
from needlework.experiment.recipe import build
from needlework.experiment.tasks import TASKS
from needlework.recipes import demo


@pytest.fixture(scope="module")
def corpus(small_text):
    return load_corpus(small_text, byte_tokenizer())


@pytest.mark.parametrize("task", TASKS)
def test_every_task_fills_its_rows_to_the_length_that_was_asked_for(corpus, task):
    episodes = TASKS[task](corpus, 0, 3, 1024)
    assert episodes.input_ids.shape == (3, 1024)
    assert (episodes.targets != -100).any(1).all()


@pytest.mark.parametrize(
    ("GiB", "vocabulary", "T", "rows"),
    [(140, 8192, 2048, 35), (140, 8192, 65536, 1), (24, 8192, 2048, 6), (24, 32000, 65536, 1)],
)
def test_a_gpu_takes_the_rows_whose_logits_fill_a_sixteenth_of_it(monkeypatch, GiB, vocabulary, T, rows):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GiB << 30))
    model = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(vocab_size=vocabulary))
    assert at_once(model, T) == rows
    model.device = torch.device("cpu")
    assert at_once(model, T) == max(1, 8192 // T)


def test_an_unknown_task_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown task 'neddle'; known: needle"):
        Evaluation(tasks=("neddle",))


def test_a_model_is_measured_on_every_task_at_every_length_by_position_and_by_the_papers_own_diagnoses(corpus):
    evaluation = Evaluation(lengths=(256, 512), tokens=512, rows=2, tasks=("needle", "passkey"), positions=1024, diagnose=256)
    entry = measure(build(demo.qdelta()), corpus, evaluation)
    assert all(set(entry[name]) == {"256", "512"} for name in ("loss", "needle", "passkey"))
    assert entry["positions"]["from"] == [0, 128, 256, 512] and len(entry["positions"]["loss"]) == 4
    assert set(entry["diagnostics"]) == {"qdelta", "state_norms"} and len(entry["diagnostics"]["qdelta"]) == 2


def test_the_mask_of_a_needle_in_text_covers_the_sentence(corpus):
    ids, inside = needle_in_text(corpus, 0, 400, rows=2)
    assert ids.shape == inside.shape == (2, 400)
    for row, mask in zip(ids, inside, strict=True):
        assert decode_bytes(row[mask]).startswith(b" The locker number of amber-lantern is ")
