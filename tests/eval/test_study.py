"""A study: runs gathered by mixer, claims judged over paired seeds, a page made from the runs alone."""

import json
import math

import pytest

from needlework.eval.study import Claim, load_study
from needlework.eval.study_page import write_page
from needlework.eval.words import count, size

LENGTHS, TASKS = [128, 256], ["needle", "uuid"]
FAMILIES = {"One": ("plain", "better"), "Two": ("other",)}


def run(name, seed, share, **changes):
    return {
        "name": name, "seed": seed, "title": name.title(), "parameters": 1000, "lengths": LENGTHS, "train_length": 128,
        "tasks": TASKS, "state_bytes": {"128": 64, "256": 64}, "corpus": {"sha256": "0" * 64}, "machine": "a machine",
        "versions": {"torch": "2.11"}, "commit": "abc", "loss": {"128": 2.0, "256": 2.1},
        "train": {"steps": [1], "loss": [3.0], "tokens": 10, "seconds": 1.0, "tokens_per_second": 10.0},
        "positions": {"from": [0, 128], "loss": [2.0, 2.1]},
        **{task: {str(T): {"accuracy": share, "exact": share, "digits": 8, "values": 2} for T in LENGTHS} for task in TASKS},
    } | changes  # fmt: skip


def write(directory, *runs):
    directory.mkdir(exist_ok=True)
    for r in runs:
        (directory / f"{r['name']}-{r['seed']}.json").write_text(json.dumps(r))
    return directory


@pytest.fixture
def study(tmp_path):
    plain = [run("plain", s, 0.5 + 0.1 * s) for s in range(3)]
    better = [run("better", s, 0.7 + 0.1 * s + 0.01 * (s == 1)) for s in range(3)]
    other = [run("other", s, (0.9, 0.1, 0.6)[s]) for s in range(3)]
    return load_study(write(tmp_path / "runs", *plain, *better, *other), ("plain", "better"), FAMILIES, ("better", "absent"))


def claim(better, worse, tasks=("needle",), multiples=(1.0, 2.0)):
    return Claim(f"{better} finds more than {worse}", better, worse, tasks, multiples)


def test_runs_are_gathered_by_mixer_in_the_order_asked_for(study):
    assert list(study.runs) == ["plain", "better", "other"] and study.lengths == (128, 256)
    assert study.glance == ("better",)  # who was not run is not shown
    assert study.accuracy("plain", "needle", 128) == pytest.approx((0.6, 0.1, 3))


def test_families_that_compare_nothing_are_left_out(tmp_path):
    runs = write(tmp_path / "runs", run("plain", 0, 0.5), run("more", 0, 0.5), run("better", 0, 0.5))
    families = FAMILIES | {"Alone": ("more", "absent")}
    assert load_study(runs, families=families).families == {"One": FAMILIES["One"]}
    alone = load_study(runs, families={"Two": FAMILIES["Two"]}, glance=("other",))
    assert alone.families == {"All": tuple(alone.runs)} and alone.glance == tuple(alone.runs) and len(alone.runs) == 3


def test_a_claim_is_judged_over_seeds_in_pairs(study):
    """plain and better move together from seed to seed: unpaired, their spread would hide the difference."""
    assert study.judge(claim("better", "plain")).word == "holds"
    assert study.judge(claim("plain", "better")).word == "the opposite"
    assert study.judge(claim("other", "plain")).word == "within the interval"
    difference = study.judge(claim("better", "plain")).difference
    assert difference.mean == pytest.approx((0.2 + 0.21 + 0.2) / 3)
    assert difference.deviation == pytest.approx(0.01 / math.sqrt(3))


def test_what_was_not_run_or_only_once_is_said_to_be_so(study, tmp_path):
    assert study.judge(claim("absent", "plain")).word == "not run"
    assert study.judge(claim("better", "plain", multiples=(64.0,))).word == "not run"
    once = load_study(write(tmp_path / "once", run("plain", 0, 0.1), run("better", 0, 0.9)))
    assert once.judge(claim("better", "plain")).word == "one seed cannot say"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"corpus": {"sha256": "1" * 64}}, r"not one study \(corpora/ has no manifest"),
        ({"lengths": [128]}, "not one study"),
        ({"tasks": ["needle", "uuid", "passkey"]}, "misses the key 'passkey'"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused_by_name(tmp_path, changes, message):
    directory = write(tmp_path, run("plain", 0, 0.1), run("plain", 1, 0.1, **changes))
    with pytest.raises(ValueError, match=rf"plain-1.json: .*{message}"):
        load_study(directory)
    with pytest.raises(ValueError, match="no runs there"):
        load_study(tmp_path / "nothing")


def manifest(directory, digit, packages, offsets="o"):
    """Of packages name -> (held out, version): 100 bytes each, b 30,000."""
    files = [
        {"name": n, "held_out": held, "bytes": 30_000 if n == "b" else 100, "sha256": f"{n} {v}", "of": f"{n}-dist {v}"}
        for n, (held, v) in packages.items()
    ]
    (directory / "corpora").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"sha256": digit * 64, "files": files, "stores": {"held_out": {"offsets_sha256": offsets}}})
    (directory / "corpora" / f"{digit * 16}.json").write_text(text)


TEXT = {"a": (False, "1"), "b": (False, "1"), "c": (True, "1")}


def test_texts_that_differ_in_a_small_package_are_one_study_and_the_page_says_which(tmp_path):
    directory = write(tmp_path, run("plain", 0, 0.1), run("plain", 1, 0.2, corpus={"sha256": "1" * 64}))
    manifest(directory, "0", TEXT)
    manifest(directory, "1", TEXT | {"a": (False, "2")})
    page = write_page(load_study(directory), tmp_path / "page", (), "").read_text()
    assert (
        "Corpus SHA-256 0000000000000000. Plain, seed 1, read 1111111111111111: a-dist 2 for a-dist 1, 0.33% of its training"
        in page
    )


@pytest.mark.parametrize(
    "changes, offsets, reason",
    [
        ({"b": (False, "2")}, "o", "99.7% of their training sides differ"),
        ({"c": (True, "2")}, "o", "their held-out sides differ"),
        ({"a": (False, "2")}, "p", "their held-out sides differ"),
    ],
)
def test_texts_that_measure_or_train_something_else_are_not_one_study(tmp_path, changes, offsets, reason):
    directory = write(tmp_path, run("plain", 0, 0.1), run("plain", 1, 0.2, corpus={"sha256": "1" * 64}))
    manifest(directory, "0", TEXT)
    manifest(directory, "1", TEXT | changes, offsets)
    with pytest.raises(ValueError, match=rf"plain-1.json: corpus is 1+, .* not one study \({reason}\)"):
        load_study(directory)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_manifest_that_is_none_is_named(tmp_path, text):
    directory = write(tmp_path, run("plain", 0, 0.1))
    (directory / "corpora").mkdir()
    (directory / "corpora" / "torn.json").write_text(text)
    with pytest.raises(ValueError, match=r"torn.json: expected a corpus's manifest"):
        load_study(directory)


def test_the_page_says_every_number_and_every_verdict(study, tmp_path):
    page = write_page(study, tmp_path / "page", (claim("better", "plain"), claim("absent", "plain")), "Much.").read_text()
    assert page.startswith("# The comparison at 1K parameters\n") and "mean over seeds ± their standard deviation" in page
    assert "Of 2 claims: 1 × holds, 1 × not run." in page
    assert "| Plain | 3 | 2.000 ± 0.000 | 60 ± 10 | 60 ± 10 | 10 | 64 B |" in page
    assert "| +20.3 ± 1.4 | 3 | **holds** |" in page and "**not run**" in page
    assert page.endswith("## What this cannot say\n\nMuch.\n")
    assert {p.name for p in (tmp_path / "page").iterdir()} == {
        "README.md",
        "glance.png",
        "retrieval.png",
        "state.png",
        "positions.png",
    }


def test_one_seed_has_no_spread_and_the_page_says_so(tmp_path):
    runs = write(tmp_path / "runs", run("plain", 0, 0.5), run("better", 0, 0.7))
    page = write_page(load_study(runs), tmp_path / "page", (claim("better", "plain"),), "").read_text()
    assert "1 seed each" in page and "No number has a spread" in page and "±" not in page


def test_a_run_that_its_guard_ended_is_told_and_counts_nowhere(tmp_path):
    ended = run("better", 1, 0.9) | {"ended": {"step": 199, "steps": 1200, "why": "the loss is nan, of model.blocks.0"}}
    lost = run("other", 0, 0.9) | {"ended": {"step": 2, "steps": 1200, "why": "a leap"}}
    for of in (ended, lost):
        for key in ("loss", "parameters", "train", "state_bytes", *TASKS):
            del of[key]
    directory = write(tmp_path / "runs", *(run("plain", s, 0.5) for s in (0, 1)), run("better", 0, 0.7), ended, lost)
    study = load_study(directory)
    assert len(study.runs["better"]) == 1 and "other" not in study.runs
    assert study.judge(claim("better", "plain")).difference.n == 1
    assert study.judge(claim("other", "plain")).word == "ended early"
    assert study.judge(claim("absent", "plain")).word == "not run"
    page = write_page(study, tmp_path / "page", (claim("other", "plain"),), "").read_text()
    assert (
        "| Better | 1 | abc | 199 of 1,200 | the loss is nan, of model.blocks.0 |" in page
        and "| Other | 0 | abc | 2 of" in page
    )
    with pytest.raises(ValueError, match=r"no runs there .* ended early"):
        load_study(write(tmp_path / "none", lost))


def test_a_run_from_a_copy_without_its_history_is_said_to_be_one(tmp_path):
    """As `ran.json` has it where there is no git."""
    directory = write(tmp_path / "runs", run("plain", 0, 0.5, commit=None), run("plain", 1, 0.5))
    page = write_page(load_study(directory, (), {"One": ("plain",)}), tmp_path / "page", (), "")
    assert "code abc, of no known commit" in page.read_text()


@pytest.mark.parametrize("number, said", [(0, "0"), (999, "999"), (59_764_296, "59.8M"), (999_700, "1000K"), (2e15, "2000T")])
def test_counts_are_told_in_decimal_units(number, said):
    assert count(number) == said


@pytest.mark.parametrize("number, said", [(64, "64 B"), (1023, "1023 B"), (16_384, "16 KiB"), (4_942_000, "4.71 MiB")])
def test_bytes_are_told_in_binary_units(number, said):
    assert size(number) == said


def test_equal_runs_give_equal_pages(study, tmp_path):
    pages = [write_page(study, tmp_path / name, (), "").parent for name in "ab"]
    for name in ("README.md", "glance.png", "retrieval.png", "state.png"):
        assert (pages[0] / name).read_bytes() == (pages[1] / name).read_bytes()
