"""Each task read as a person reads it, from the bytes of its rows alone: what is asked, where the answer is, and where nothing is
scored."""

import re

import pytest

from needlework.data import NeedleMix, byte_tokenizer, load_corpus
from needlework.experiment.tasks import TASKS

PAIRS = {"needle": 1, "needles": 4, "needles-2": 2, "needles-8": 8}
RULER = {
    "passkey": (1, r"\d{7}"),
    "number": (1, r"\d{7}"),
    "uuid": (1, r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "multikey": (4, r"\d{7}"),
}
NOISE = " The kettle hums. The lamp is lit. Rain taps on the glass. Nobody is in a hurry today."
T, ROWS = 640, 6


@pytest.fixture(scope="module")
def corpus(small_text):
    return load_corpus(small_text, byte_tokenizer())


def read(tokens):
    """A letter a token, an end of text among them, so that places in the text are places in the row."""
    return "".join(chr(token) if token < 256 else "\0" for token in map(int, tokens))


def rows(corpus, task, seed=0, count=ROWS):
    """Of each row its text with the last token, and the places in it that are scored."""
    episodes = TASKS[task](corpus, seed, count, T)
    for ids, targets in zip(episodes.input_ids, episodes.targets, strict=True):
        assert len(ids) == T
        scored = (targets >= 0).nonzero().flatten()
        assert (targets[scored[scored < T - 1]] == ids[scored[scored < T - 1] + 1]).all()  # the answer is in the input
        last = (
            int(targets[-1]) if targets[-1] >= 0 else ord("\n")
        )  # the needle tasks' last token is not scored, and in no tensor
        yield read([*ids, last]), [int(t) + 1 for t in scored]


def found_again(haystack, sides):
    """Whether the text is a stretch of one side and not of the other."""
    return [haystack in read(side.tokens) for side in sides]


def test_no_document_is_on_both_sides(corpus):
    train, held_out = ([read(d) for d in side] for side in (corpus.train, corpus.held_out))
    assert train and held_out and not set(train) & set(held_out)
    assert len(corpus.train.tokens) > 2 * len(corpus.held_out.tokens)


@pytest.mark.parametrize("task", PAIRS)
def test_a_needle_asks_at_the_end_for_pairs_in_held_out_text(corpus, task):
    n, seen = PAIRS[task], []
    for text, scored in rows(corpus, task):
        needles = list(re.finditer(r"\n#@([a-z]{2})=(\d{4})\n", text))
        pairs, queries = needles[:-n], needles[-n:]
        assert len(pairs) == n and len({m[1] for m in pairs}) == n
        assert {m.groups() for m in queries} == {m.groups() for m in pairs}
        assert [m.start() for m in queries] == [len(text) - 11 * i for i in range(n, 0, -1)]
        assert scored == [place for m in queries for place in range(m.start(2), m.end(2))]
        assert found_again(re.sub(r"\n#@[a-z]{2}=\d{4}\n", "", text), (corpus.held_out, corpus.train)) == [True, False]
        seen.append((tuple(m.groups() for m in queries), tuple(m.start() for m in pairs)))
    values, places = zip(*seen, strict=True)
    assert len(set(values)) == len(set(places)) == ROWS


@pytest.mark.parametrize("task", ("needles", "needles-8"))
def test_pairs_are_asked_in_an_order_of_their_own(corpus, task):
    n, same = PAIRS[task], []
    for text, _ in rows(corpus, task):
        keys = re.findall(r"\n#@([a-z]{2})=\d{4}\n", text)
        same.append(keys[:n] == keys[n:])
    assert not all(same)


@pytest.mark.parametrize("task", RULER)
def test_a_sentence_is_asked_for_by_its_key(corpus, task):
    count, value = RULER[task]
    seen, asked_places = [], set()
    for text, scored in rows(corpus, task):
        said = dict(re.findall(rf" The locker number of (\w+-\w+) is ({value})\.", text))
        assert len(said) == count and len(set(said.values())) == count
        question = re.search(rf" What is the locker number of (\w+-\w+)\? The locker number of \1 is( {value})$", text)
        assert said[question[1]] == question[2].strip()
        assert scored == list(range(question.start(2), question.end(2)))
        hay = re.sub(rf" The locker number of \w+-\w+ is {value}\.", "", text[: question.start()])
        if task == "passkey":
            assert hay == (NOISE * T)[: len(hay)]
        else:
            assert found_again(hay, (corpus.held_out, corpus.train)) == [True, False]
        asked_places.add(list(said).index(question[1]))
        seen.append((*question.groups(), text.index(question[1])))
    assert len(set(seen)) == len({key for key, *_ in seen}) == len({value for _, value, _ in seen}) == ROWS
    assert len({place for *_, place in seen}) > 1 and (count == 1 or len(asked_places) > 1)


def test_an_induction_trial_repeats_its_own_cue_after_one_held_out_document(corpus):
    seen = []
    for text, scored in rows(corpus, "induction"):
        cue = r" The access code for record (\d{7}) is((?: \d){5})"
        whole = re.fullmatch(rf".{cue}(.*) The access code for record \1 is\2", text, re.S)  # the end of text first
        digits = range(len(text) - 10, len(text))
        assert scored == [place for place in digits if text[place] != " "]
        assert sum(whole[3] in read(document) for document in corpus.held_out) == 1
        assert whole[3] not in read(corpus.train.tokens)
        seen.append(whole.groups())
    for part in zip(*seen, strict=True):
        assert len(set(part)) == ROWS


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_is_other_questions_and_the_same_seed_the_same(corpus, task):
    one, again, other = (list(rows(corpus, task, seed)) for seed in (0, 0, 1))
    assert one == again
    assert not {text for text, _ in one} & {text for text, _ in other}
    assert list(rows(corpus, task, count=2)) == one[:2]  # a row does not depend on how many there are


@pytest.mark.parametrize(("dense", "sparse", "kind"), [(1, 0, "dense"), (0, 1, "sparse"), (0, 0, "text")])
def test_training_rows_are_training_text_with_the_shares_of_episodes_that_were_asked_for(corpus, dense, sparse, kind):
    mix = NeedleMix(dense=dense, sparse=sparse, dense_pairs=(2, 5), sparse_pairs=(1, 3), asks=2)
    counts = set()
    batches = [mix.batch(corpus, 0, step, 4, 300) for step in (0, 1)]
    for ids, labels in ((ids, labels) for batch in batches for ids, labels in zip(*batch, strict=True)):
        assert (labels[:-1] == ids[1:]).all() and (labels >= 0).all()  # the loss is on every token
        text = read([*ids, labels[-1]])
        needles = re.findall(r"\n#@([a-z]{2})=(\d{4})\n", text)
        assert len(dict(needles)) == len(set(needles))  # a key has one value
        asks = [sum(key == of for key, _ in needles) for of in dict(needles)]
        hay = re.sub(r"\n#@[a-z]{2}=\d{4}\n", "", text)
        assert found_again(hay, (corpus.held_out, corpus.train))[1]
        counts.add(len(asks))
        if kind == "dense":
            assert 2 <= len(asks) <= 5 and len(needles) == 301 // 11 and max(asks) - min(asks) <= 1
            order = [key for key, _ in needles]
            n = len(asks)
            assert all(len(set(order[i : i + n])) == n for i in range(0, len(order) - n + 1, n))  # rounds
        elif kind == "sparse":
            assert 1 <= len(asks) <= 3 and set(asks) == {3}  # the pair and two questions
        else:
            assert not needles and hay == text
    assert len({str(batch.input_ids.tolist()) for batch in batches}) == 2
    assert kind == "text" or len(counts) > 1
