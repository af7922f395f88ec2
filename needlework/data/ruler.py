"""Needles in the manner of RULER (arXiv 2404.06654), with sentences of our own and any tokenizer.

Every needle is a sentence, " The locker number of amber-lantern is 4831907."; the question at the end asks for one or
several of them. `Ruler` is the whole family:

    PASSKEY, NUMBER, UUID   one needle: a number in repeated noise, a number in text, a uuid in text
    MULTI_KEY               four needles, one asked
    MULTI_NEEDLE            four needles with a value each, all asked in one question (LUCID's)

lm-eval's RULER asks a model to generate from texts that it downloads. Episodes are made here from any corpus and scored teacher-forced,
so that models too small to generate are measured, at every length, without a network.
"""

import uuid
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from needlework.fields import Count, fit

from .batch import Episodes, scored
from .corpus import Corpus
from .rng import generator
from .tokenizer import encode

NOISE = " The kettle hums. The lamp is lit. Rain taps on the glass. Nobody is in a hurry today."
COLOURS = "amber ashen azure bronze cobalt coral crimson ivory jade maroon ochre olive pearl russet scarlet violet".split()
THINGS = "anchor basket candle compass feather hammer harbour lantern meadow mirror needle orchard pillow saddle thimble valley".split()


class RulerEpisodes(NamedTuple):
    """The same questions twice: teacher-forced (episodes), and to be answered by generation.

    episodes: the values' tokens are scored. prompts: n tensors [t] int64 that end where the answer begins.
    answers: of each prompt the strings that must all occur in the generated text.
    """

    episodes: Episodes
    prompts: list[Tensor]
    answers: list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """One task: values "number" (7 digits) or "uuid"; haystack "noise" or "text" (held out); needles; how many asked.

    >>> from needlework.data import CorpusConfig, Ruler, byte_tokenizer, load_corpus
    >>> corpus = load_corpus(CorpusConfig(max_bytes=1 << 16), byte_tokenizer())
    >>> asked = Ruler(haystack="noise", needles=4, asked=2).episodes(corpus, seed=0, count=3, T=512)
    >>> len(asked.prompts), [len(strings) for strings in asked.answers]
    (3, [2, 2, 2])
    """

    kind: str = "ruler"
    values: Literal["number", "uuid"] = "number"
    haystack: Literal["noise", "text"] = "text"
    needles: Count = 1
    asked: Count = 1

    def __post_init__(self):
        fit("ruler", self)
        if not 1 <= self.asked <= self.needles <= len(COLOURS) * len(THINGS):
            raise ValueError(f"ruler: 1 <= asked <= needles <= 256, got asked {self.asked}, needles {self.needles}")

    def episodes(self, corpus: Corpus, seed: int, count: int, T: int) -> RulerEpisodes:
        """`count` questions whose teacher-forced rows have T tokens; ValueError if the needles alone need more."""
        rows, places, prompts, answers = [], [], [], []
        for row in range(count):
            rng = generator(f"{self}", seed, 0, row)
            keys = [f"{COLOURS[i % 16]}-{THINGS[i // 16]}" for i in rng.permutation(256)[: self.needles]]
            values = [self._value(rng) for _ in keys]
            asked = rng.permutation(self.needles)[: self.asked]
            prompt_end = encode(corpus.tokenizer, _question([keys[i] for i in asked]))
            answer, place = _answer(corpus, [values[i] for i in asked])
            sentences = [
                encode(corpus.tokenizer, f" The locker number of {key} is {value}.")
                for key, value in zip(keys, values, strict=True)
            ]
            room = T + 1 - len(prompt_end) - len(answer) - sum(map(len, sentences))
            if room < 0:
                raise ValueError(f"ruler: T = {T} is too short by {-room} tokens for {self}")
            prompt = np.concatenate([self._bury(corpus, rng, sentences, room), prompt_end])
            rows.append(np.concatenate([prompt, answer]))
            places.append(len(prompt) + place)
            prompts.append(torch.from_numpy(prompt))
            answers.append(tuple(values[i] for i in asked))
        return RulerEpisodes(scored(rows, places), prompts, answers)

    def _value(self, rng: np.random.Generator) -> str:
        if self.values == "uuid":
            return str(uuid.UUID(bytes=rng.bytes(16), version=4))
        return str(rng.integers(10**6, 10**7))

    def _bury(self, corpus: Corpus, rng: np.random.Generator, sentences: list[np.ndarray], room: int) -> np.ndarray:
        """The sentences in `room` tokens of haystack: in text anywhere, in noise between its repetitions."""
        if self.haystack == "text":
            text, step = corpus.held_out.sample(rng, room), 1
        else:
            noise = encode(corpus.tokenizer, NOISE)
            text, step = np.resize(noise, room), len(noise)
        cuts = step * np.sort(rng.integers(room // step + 1, size=len(sentences)))
        return np.insert(text, np.repeat(cuts, [len(s) for s in sentences]), np.concatenate(sentences))


def _question(keys: list[str]) -> str:
    if len(keys) == 1:
        return f" What is the locker number of {keys[0]}? The locker number of {keys[0]} is"
    listed = f"{', '.join(keys[:-1])} and {keys[-1]}"
    return f" What are the locker numbers of {listed}? The locker numbers of {listed} are, in this order,"


def _answer(corpus: Corpus, values: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The answer's tokens, and the indices of those that belong to a value."""
    comma = encode(corpus.tokenizer, ",")
    parts, places, length = [], [], 0
    for i, value in enumerate(values):
        if i:
            parts.append(comma)
            length += len(comma)
        tokens = encode(corpus.tokenizer, f" {value}")
        parts.append(tokens)
        places.append(length + np.arange(len(tokens)))
        length += len(tokens)
    return np.concatenate(parts), np.concatenate(places)


PASSKEY = Ruler(haystack="noise")
NUMBER = Ruler()
UUID = Ruler(values="uuid")
MULTI_KEY = Ruler(needles=4)
MULTI_NEEDLE = Ruler(needles=4, asked=4)
