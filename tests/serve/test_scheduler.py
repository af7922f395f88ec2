"""Who runs next, on what, and what every end gives back."""

import pytest

from needlework.serve.capacity import Pool, SchedulerConfig
from needlework.serve.pools import most_pages, pages_for
from needlework.serve.request import Request
from needlework.serve.scheduler import Scheduler
from needlework.serve.step import CopyPage, CopySlot, Drop, Park, Unpark


def config(pages=None, windows=(None,), **options):
    """Pages of 16, chunks cut at 32."""
    given = {"length": 160, "batch": 4, "slots": 6, "slot_bytes": 100, "page": 16, "align": 32, "budget": 64} | options
    need = [most_pages(given["length"], window, given["page"], given["budget"]) for window in windows]
    pools = tuple(Pool(window, pages or 4 * n, 10) for window, n in zip(windows, need, strict=True))
    return SchedulerConfig(pools=pools, **given)


def request(id, prompt, max_tokens=10, first=None):
    """A prompt of so many tokens, which begins like no other."""
    tokens = range(ord(id) * 1000, ord(id) * 1000 + prompt) if first is None else first
    return Request(id=id, prompt=tuple(tokens), max_tokens=max_tokens)


def scheduler(*requests, **options):
    made = Scheduler(config(**options))
    for one in requests:
        made.add(one)
    return made


def rows(step):
    """(id, tokens) of decodes, and of prefills."""
    return (
        [(row.request.id, row.length) for row in step.decodes],
        [(row.request.id, row.start, row.length) for row in step.prefills],
    )


def run(made, tokens=7, finished=frozenset()):
    """One step; it samples `tokens` everywhere."""
    step = made.step()
    ids = [one.id for one in step.sampled]
    made.done(step, dict.fromkeys(ids, tokens), finished)
    return step


def free(made):
    return made.memory.slots.free, {window: pool.free for window, pool in made.memory.pages.items()}, made.memory.host_bytes


def test_decodes_come_first_and_prefills_by_arrival_within_the_budget():
    made = scheduler(request("a", 20), request("b", 100), request("c", 30), prefix=False)
    assert rows(run(made)) == ([], [("a", 0, 20), ("b", 0, 32)])  # 44 are left, and 12 reach no multiple of 32
    assert rows(run(made)) == ([("a", 21)], [("b", 32, 96)])
    assert rows(run(made)) == ([("a", 22)], [("b", 96, 100), ("c", 0, 30)])
    assert rows(run(made)) == ([("a", 23), ("b", 101), ("c", 31)], [])


def test_only_the_last_chunk_samples_and_only_the_first_is_fresh():
    made = scheduler(request("b", 100), prefix=False)
    found = [run(made).prefills[0] for _ in range(2)]
    assert [(row.fresh, row.last) for row in found] == [(True, False), (False, True)] and found[1].sampled == 0
    assert found[0].tokens + found[1].tokens == found[0].request.prompt
    assert [run(made).decodes[0].sampled for _ in range(3)] == [1, 2, 3]


def test_a_prompt_of_one_token_is_a_prefill():
    made = scheduler(request("a", 1))
    step = run(made)
    assert rows(step) == ([], [("a", 0, 1)]) and step.prefills[0].fresh and step.prefills[0].last


def test_nobody_is_admitted_without_a_slot_or_the_pages_of_its_chunk_and_nobody_overtakes():
    made = scheduler(request("a", 60, 60), request("b", 64, 40), request("c", 1, 1), pages=10, prefix=False, budget=128)
    assert rows(run(made)) == ([], [("a", 0, 60), ("b", 0, 64)]) and free(made)[1] == {None: 2}
    # c has its page, but a and b would have none left then
    assert rows(run(made)) == ([("a", 61), ("b", 65)], [])
    made.cancel("b")
    assert rows(run(made)) == ([("a", 62)], [("c", 0, 1)])
    slots = scheduler(request("a", 1), request("b", 1), request("c", 1), batch=2, slots=2)
    assert rows(run(slots))[1] == [("a", 0, 1), ("b", 0, 1)]
    assert rows(run(slots, finished={"a"})) == ([("a", 2), ("b", 2)], [])
    assert rows(run(slots)) == ([("b", 3)], [("c", 0, 1)])


def test_max_tokens_end_a_request_and_no_step_goes_beyond_them():
    made = scheduler(request("a", 5, 3))
    steps = [made.step() for _ in range(3)]
    assert [row.token for step in steps[1:] for row in step.decodes] == [None, None] and made.step() is None
    for step in steps:
        assert len(made) == 1
        made.done(step, {"a": 9})
    assert len(made) == 0 and free(made)[:2] == (6, {None: 40})


def test_a_token_that_the_host_has_heard_is_in_the_step():
    made = scheduler(request("a", 5))
    run(made, 33)
    ahead = made.step()
    assert ahead.decodes[0].token == 33 and made.step().decodes[0].token is None
    assert made.tokens("a") == [*made.running[0].request.prompt, 33]


def test_what_is_in_flight_when_a_request_ends_is_not_counted():
    made = scheduler(request("a", 5), request("b", 5))
    first, second = made.step(), made.step()
    made.done(first, {"a": 1, "b": 1}, {"a"})
    made.add(request("a", 5))  # the id is free again
    made.done(second, {"a": 2, "b": 2})
    assert made.tokens("a") == list(range(97000, 97005)) and made.tokens("b")[-2:] == [1, 2]


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "in flight", "decoding", "parked"])
def test_a_cancelled_request_gives_all_back(stage):
    made = scheduler(pages=12, host_bytes=1000, prefix=False)
    before = free(made)
    if stage == "parked":
        made.add(request("b", 64, 90))
        run(made)
        made.add(request("a", 64, 60))
        while made.running[-1].request.id == "a" or (len(made.running) == 1 and not made.memory.host_bytes):
            run(made)
        assert made.memory.host_bytes == 100 + 10 * pages_for(len(made.tokens("a")) - 1, 16)  # the last token has no row yet
        made.cancel("a")
        assert [type(move) for move in run(made).before if not isinstance(move, Park)] == [Drop]
        made.cancel("b")
    else:
        made.add(request("a", 100))
        for _ in range({"waiting": 0, "prefilling": 1, "in flight": 0, "decoding": 4}[stage]):
            run(made)
        flight = made.step() if stage == "in flight" else None
        made.cancel("a")
        if flight is not None:
            made.done(flight, {})
    assert free(made) == before and len(made) == 0 and made.step() is None
    made.cancel("a")


def answers(ids, prompt, max_tokens=10):
    """Requests of one prompt."""
    return [request(id, prompt, max_tokens, range(prompt)) for id in ids]


def test_answers_to_one_prompt_are_prefilled_once_and_share_its_pages():
    made = scheduler(windows=(None, 20), prefix=False)
    made.add(*answers("abc", 100))
    assert rows(run(made)) == ([], [("a", 0, 64)]) and free(made)[0] == 3  # the others have their slots
    step = run(made)
    (row,) = step.prefills
    assert rows(step) == ([], [("a", 64, 100)]) and [one.request.id for one in row.forks] == ["b", "c"] and not step.before
    assert [one.request.id for one in row.owners] == [one.id for one in step.sampled] == ["a", "b", "c"]
    assert step.after == tuple(CopySlot(row.slot, one.slot) for one in row.forks)
    assert step.admitted == tuple((*one, (), 100) for one in row.forks)
    assert free(made)[1] == {None: 33, 20: 23}  # of the window pages 2 … 6 are in this step, and 5 and 6 are of all three
    ends = [row.pages[window][-1] for window in (None, 20)]
    step = run(made)
    assert rows(step) == ([("a", 101), ("b", 101), ("c", 101)], []) and len(step.paged) == 3
    lines = [{window: line.tolist() for window, line in one.pages.items()} for one in step.decodes]
    assert [line[None][:6] for line in lines] == [[0, 1, 2, 3, 4, 5]] * 3 and [line[20][:5] for line in lines] == [[-1] * 5] * 3
    new = [(window, lines[i][window][-1]) for i in (0, 1) for window in (None, 20)]
    assert step.before == tuple(CopyPage(window, end, page) for (window, page), end in zip(new, ends * 2, strict=True))
    assert [lines[2][window][-1] for window in (None, 20)] == ends  # the last one writes where all were
    assert [one.token for one in step.decodes] == [7, 7, 7]


def test_answers_to_a_prompt_that_fills_its_pages_copy_none():
    made = scheduler(prefix=False)
    made.add(*answers("ab", 64))
    (row,) = run(made).prefills
    (a, b), last = (step := run(made)).decodes, row.pages[None].tolist()[:4]
    assert not step.before and a.pages[None].tolist()[:4] == b.pages[None].tolist()[:4] == last
    assert a.pages[None][4] != b.pages[None][4]


def test_answers_that_may_share_no_page_copy_those_that_are_read_again():
    made = scheduler(windows=(None, 20), prefix=False, shared=False)
    made.add(*answers("ab", 50))
    (row,) = (step := run(made)).prefills
    (a, b) = (after := run(made)).decodes
    copies = [CopyPage(None, *pair) for pair in zip(row.pages[None], b.pages[None], strict=True)]
    copies += [CopyPage(20, *pair) for pair in zip(row.pages[20].tolist()[1:], b.pages[20].tolist()[1:], strict=True)]
    assert step.after == (CopySlot(row.slot, b.slot), *copies) and not after.before
    assert not {*a.pages[None]} & {*b.pages[None]} and b.pages[20][0] == -1


def test_who_comes_too_late_or_finds_no_slot_is_prefilled_with_the_next():
    made = scheduler(batch=2, slots=2, prefix=False)
    made.add(*answers("abcd", 20, 2))
    first = run(made)
    assert rows(first) == ([], [("a", 0, 20)]) and [one.request.id for one in first.prefills[0].forks] == ["b"]
    run(made)
    last = run(made)
    assert rows(last) == ([], [("c", 0, 20)]) and [one.request.id for one in last.prefills[0].forks] == ["d"]
    made.add(*answers("e", 20))
    while (step := run(made)).decodes:
        pass
    assert rows(step) == ([], [("e", 0, 20)])


@pytest.mark.parametrize("gone", ["leader", "follower", "all"])
@pytest.mark.parametrize("stage", ["waiting", "prefilling", "in flight", "forked", "decoding", "failed"])
def test_answers_to_one_prompt_end_at_any_stage_and_the_others_go_on(stage, gone):
    made = scheduler(prefix=False)
    before = free(made)
    made.add(*answers("abc", 100, 3))
    for _ in range({"waiting": 0, "prefilling": 1, "in flight": 0, "forked": 1, "decoding": 3, "failed": 1}[stage]):
        run(made)
    flight = made.step() if stage in ("in flight", "forked", "failed") else None
    left = {"leader": "bc", "follower": "ac", "all": ""}[gone]
    for id in {"a", "b", "c"} - {*left}:
        made.cancel(id)
    if stage == "failed":
        lost = made.failed(flight)
        assert (None if lost is None else lost.id) == {"leader": None, "follower": "a", "all": None}[gone]
        left = left.replace("a", "")
    elif flight is not None:
        made.done(flight, dict.fromkeys("abc", 7))
    done, prefilled = {}, 0
    while len(made):
        step = run(made)
        prefilled += sum(len(row.tokens) for row in step.prefills)
        done |= {one.id: 100 + one.max_tokens for one in step.sampled}
    assert done.keys() >= {*left} and free(made) == before
    assert prefilled == (
        0
        if not left or stage in ("forked", "decoding")
        else 36
        if gone == "follower" and stage in ("prefilling", "in flight")
        else 100
    )


def test_who_prefills_for_others_makes_way_and_they_wait_with_it():
    made = scheduler(request("z", 30, 120), pages=12, host_bytes=1000, budget=32, prefix=False, length=160)
    run(made)
    made.add(*answers("abc", 150, 5))
    while len(made.running) < 4:
        run(made)
    assert [seq.leader is None for seq in made.running] == [True, True, False, False]
    step = run(made)
    while not step.before:
        step = run(made)
    assert [move.id for move in step.before] == ["a"] and [seq.request.id for seq in made.running] == ["z"]
    assert [seq.request.id for seq in made.waiting] == ["a", "b", "c"] and all(seq.leader is None for seq in made.waiting)
    while len(made):
        run(made, 5)
    assert free(made) == (6, {None: 12}, 0)


def test_pages_that_wait_for_copies_make_way_for_the_prompt_itself():
    made = scheduler(pages=12, budget=32, prefix=False, shared=False)
    made.add(*answers("ab", 100, 3))
    found = [(rows(run(made))[1], [seq.request.id for seq in made.running]) for _ in range(4)]
    assert found == [
        ([("a", 0, 32)], ["a", "b"]), ([("a", 32, 64)], ["a", "b"]), ([("a", 64, 96)], ["a"]), ([("a", 96, 100)], ["a"])
    ]  # fmt: skip
    while len(made):
        run(made)
    assert free(made) == (6, {None: 12}, 0)


def test_short_of_pages_snapshots_go_first_then_the_youngest_is_parked_and_comes_back_where_it_was():
    made = scheduler(request("s", 40, 1), pages=10, host_bytes=1000)
    run(made), run(made)
    assert len(made.memory.snapshots.prefix) == 1 and free(made)[1] == {None: 8}
    made.add(request("a", 60, 60))
    made.add(request("b", 60, 60))
    moves, gone = [], None
    while not any(isinstance(move, Park) for move in moves):
        step = run(made, 5)
        moves += step.before
        gone = len(moves) if gone is None and not len(made.memory.snapshots.prefix) else gone
    park = moves[-1]
    assert gone is not None and park.id == "b" and made.memory.host_bytes == 100 + 10 * len(park.pages[None])
    left = made.tokens("b")
    assert [row.request.id for row in step.decodes] == ["a"]
    while made.memory.host_bytes:
        step = run(made, 5, {"a"})
    (back,) = step.before
    assert isinstance(back, Unpark) and back.id == "b" and len(back.pages[None]) == len(park.pages[None])
    (row,) = step.decodes
    assert (row.length, row.token, row.slot) == (len(left), 5, back.slot)
    assert [x[1:] for x in step.admitted] == [(row.slot, tuple(left[60:]), 0)]
    assert tuple(row.pages[None])[: len(park.pages[None])] == back.pages[None]


def test_without_host_memory_the_youngest_is_computed_again_and_its_count_goes_on():
    made = scheduler(request("a", 60, 60), request("b", 60, 60), pages=10, prefix=False)
    while len(made.running) < 2:
        run(made)
    while len(made.running) == 2:
        step = run(made, 5)
    tokens = made.tokens("b")
    assert not step.before and len(tokens) > 61
    made.cancel("a")
    step = run(made, 5)
    assert rows(step) == ([], [("b", 0, 64)]) and step.admitted[0].answer == tuple(tokens[60:])
    (row,) = run(made, 5).prefills
    assert row.last and row.length == len(tokens) and row.sampled == len(tokens) - 60
    assert step.prefills[0].tokens + row.tokens == tuple(tokens)


def test_a_sequence_whose_token_is_unheard_is_held_back_and_parked_once_it_is_heard():
    made = scheduler(request("a", 60, 60), request("b", 60, 60), pages=10, host_bytes=1000, prefix=False)
    while len(made.running) < 2:
        run(made)
    flight = made.step()
    while made.memory.pages[None].free or made.running[0].computed % 16:
        made.done(flight, {"a": 1, "b": 1})
        flight = made.step()
    assert made.step() is None  # a needs a page of b's, whose token is in flight
    made.done(flight, {"a": 1, "b": 2})
    step = made.step()
    assert [row.request.id for row in step.decodes] == ["a"] and [move.id for move in step.before] == ["b"]
    assert made.tokens("b")[-1] == 2


def test_a_prefix_hit_copies_the_slot_and_shares_the_pages():
    made = scheduler(request("a", 70, 1), align=32)
    step = run(made)
    (row,), (kept,) = step.prefills, step.after
    assert row.length == 64 and kept.source == row.slot and row.pages[None].tolist() == [0, 1, 2, 3]
    run(made)
    assert free(made)[:2] == (5, {None: 36})
    made.add(request("b", 70, 1, range(97000, 97070)))
    step = run(made)
    (row,) = step.prefills
    assert step.before == (CopySlot(kept.target, row.slot),) and (row.start, row.length, row.fresh) == (64, 70, False)
    assert row.pages[None].tolist()[:4] == [0, 1, 2, 3] and not step.after
    assert step.admitted == ((row.request, row.slot, (), 64),)
    assert free(made)[:2] == (5, {None: 36})


def test_a_page_that_a_snapshot_ends_in_is_copied_for_who_writes_behind_it():
    made = scheduler(request("a", 30, 1), align=24, windows=(None, 20))
    step = run(made)
    run(made)
    made.add(request("b", 30, 1, range(97000, 97030)))
    (row,) = (hit := run(made)).prefills
    shared = made.memory.snapshots.prefix.find(made.memory.snapshots.prefix.chain(row.request.prompt)).pages
    assert hit.before == (
        CopySlot(step.after[0].target, row.slot),
        CopyPage(None, shared[None][-1], row.pages[None][-1]),
        CopyPage(20, shared[20][-1], row.pages[20][-1]),
    )
    assert row.pages[None][0] == shared[None][0] and row.pages[None][1] != shared[None][1]


def test_a_snapshot_lies_where_prompts_part_once_two_have_begun_alike():
    made = scheduler(batch=1, budget=128)
    starts = []
    for id in "abc":
        made.add(request(id, 0, 1, [*range(70), *range(ord(id) * 100, ord(id) * 100 + 40)]))
        while len(made):
            step = run(made)
            starts += [(id, row.start, row.length) for row in step.prefills]
    assert starts == [
        ("a", 0, 96), ("a", 96, 110), ("b", 0, 64), ("b", 64, 96), ("b", 96, 110), ("c", 64, 96), ("c", 96, 110)
    ]  # fmt: skip


def test_pages_of_a_window_are_given_as_it_comes_and_freed_when_it_has_passed():
    made = scheduler(request("a", 100, 60), windows=(20,), prefix=False)
    seen = []
    for _ in range(62):
        if not len(made):
            break
        step = made.step()
        (row,) = step.decodes or step.prefills
        start = row.length - 1 if step.decodes else row.start
        pages = row.pages[20].tolist()
        assert [page >= 0 for page in pages] == [16 * (i + 1) > start - 20 for i in range(-(-row.length // 16))]
        seen.append(made.memory.pages[20].count - made.memory.pages[20].free)
        made.done(step, {"a": 1})
    assert max(seen[3:]) == 3 and free(made)[1] == {20: made.memory.pages[20].count}


def test_out_of_memory_fails_the_newest_prefill_and_the_others_of_the_step_are_computed_again():
    made = scheduler(request("a", 20), request("b", 20), host_bytes=1000, budget=64)
    run(made, 4)
    made.add(request("c", 40))
    made.add(request("d", 5))
    step = made.step()
    assert rows(step) == ([("a", 21), ("b", 21)], [("c", 0, 32), ("d", 0, 5)]) and step.after
    assert made.failed(step).id == "d" and not len(made.memory.snapshots.prefix)
    assert free(made)[:2] == (6, {None: 40}) and [seq.request.id for seq in made.waiting] == ["a", "b", "c"]
    step = made.step()
    assert rows(step)[1][:2] == [("a", 0, 21), ("b", 0, 21)] and step.prefills[0].tokens[-1] == 4
    made.done(step, dict.fromkeys("abc", 4))
    made.cancel("c")
    step = made.step()
    assert made.failed(step).id == "b"  # no prefill: the newest decode
    made.cancel("a")
    assert len(made) == 0 and free(made) == (6, {None: 40}, 0)


def test_what_was_parked_before_a_step_that_failed_is_computed_again():
    made = scheduler(request("a", 60, 60), request("b", 60, 60), pages=10, host_bytes=1000, prefix=False)
    step = made.step()
    while not step.before:
        made.done(step, {"a": 1, "b": 1})
        step = made.step()
    assert isinstance(step.before[0], Park) and made.memory.host_bytes
    made.add(request("z", 1))
    assert made.failed(step).id == "a" and made.memory.host_bytes == 0
    step = made.step()
    assert step.before == (Drop("b"),) and rows(step)[1][0][:2] == ("b", 0)


def test_what_cannot_be_is_refused_with_its_numbers():
    made = scheduler(request("a", 100))
    with pytest.raises(ValueError, match="request 'a' is there already"):
        made.add(request("a", 1))
    with pytest.raises(ValueError, match=r"prompt and max_tokens are 150 \+ 11 tokens, expected at most 160"):
        made.add(request("b", 150, 11))
    made.add(request("b", 150, 10))
    for options, words in (
        ({"page": 24}, "page is 24, expected a multiple of 16"),
        ({"budget": 16}, "budget is 16, expected at least align = 32"),
        ({"slots": 3}, "slots is 3, expected at least batch = 4"),
        ({"pages": 9}, "window None has 9 pages, a request of 160 tokens needs 10"),
        ({"batch": 0}, "batch is 0, expected a whole number >= 1"),
    ):
        with pytest.raises(ValueError, match=words):
            config(**options)
