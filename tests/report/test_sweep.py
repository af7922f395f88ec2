"""A sweep: runs gathered by mixer, claims judged over paired seeds, a page made from the runs alone."""

import csv
import json
import lzma
import math
import re

import pytest

from needlework.report import sweep_figures
from needlework.report.claims import Claim, judge
from needlework.report.sweep import Void, load_sweep
from needlework.report.sweep_page import write_page

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
def sweep(tmp_path):
    plain = [run("plain", s, 0.5 + 0.1 * s) for s in range(3)]
    better = [run("better", s, 0.7 + 0.1 * s + 0.01 * (s == 1)) for s in range(3)]
    other = [run("other", s, (0.9, 0.1, 0.6)[s]) for s in range(3)]
    return load_sweep(write(tmp_path / "runs", *plain, *better, *other), ("plain", "better"), FAMILIES, ("better", "absent"))


def claim(better, worse, tasks=("needle",), multiples=(1.0, 2.0)):
    return Claim(f"{better} finds more than {worse}", better, worse, tasks, multiples)


def test_runs_are_gathered_by_mixer_in_the_order_asked_for(sweep):
    assert list(sweep.runs) == ["plain", "better", "other"] and sweep.lengths == (128, 256)
    assert sweep.glance == ("better",)  # who was not run is not shown
    found = sweep.accuracy("plain", "needle", 128)
    assert (found.values, found.mean, found.n) == ((0.5, 0.6, 0.7), pytest.approx(0.6), 3) and found.deviation == pytest.approx(
        0.1
    )


def test_families_that_compare_nothing_are_left_out(tmp_path):
    runs = write(tmp_path / "runs", run("plain", 0, 0.5), run("more", 0, 0.5), run("better", 0, 0.5))
    families = FAMILIES | {"Alone": ("more", "absent")}
    assert load_sweep(runs, families=families).families == {"One": FAMILIES["One"]}
    alone = load_sweep(runs, families={"Two": FAMILIES["Two"]}, glance=("other",))
    assert alone.families == {"All": tuple(alone.runs)} and alone.glance == tuple(alone.runs) and len(alone.runs) == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"corpus": {"sha256": "1" * 64}}, r"not one sweep \(corpora/ has no manifest"),
        ({"lengths": [128]}, "not one sweep"),
        ({"parameters": 999}, "parameters is 999, seed 0 has 1000: not one model"),
        ({"state_bytes": {"128": 64, "256": 128}}, "state_bytes is .*: not one model"),
        ({"tasks": ["needle", "uuid", "passkey"]}, "misses the key 'passkey'"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused_by_name(tmp_path, changes, message):
    directory = write(tmp_path, run("plain", 0, 0.1), run("plain", 1, 0.1, **changes))
    with pytest.raises(ValueError, match=rf"plain-1.json: .*{message}"):
        load_sweep(directory)
    with pytest.raises(ValueError, match="no runs there"):
        load_sweep(tmp_path / "nothing")


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


def test_texts_that_differ_in_a_small_package_are_one_sweep_and_the_page_says_which(tmp_path):
    directory = write(tmp_path, run("plain", 0, 0.1), run("plain", 1, 0.2, corpus={"sha256": "1" * 64}))
    manifest(directory, "0", TEXT)
    manifest(directory, "1", TEXT | {"a": (False, "2")})
    page = write_page(load_sweep(directory), tmp_path / "page", (), "").read_text()
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
def test_texts_that_measure_or_train_something_else_are_not_one_sweep(tmp_path, changes, offsets, reason):
    directory = write(tmp_path, run("plain", 0, 0.1), run("plain", 1, 0.2, corpus={"sha256": "1" * 64}))
    manifest(directory, "0", TEXT)
    manifest(directory, "1", TEXT | changes, offsets)
    with pytest.raises(ValueError, match=rf"plain-1.json: corpus is 1+, plain-0.json has 0+: not one sweep \({reason}\)"):
        load_sweep(directory)


def test_a_sweep_whose_files_are_compressed_has_the_same_page(tmp_path):
    runs = write(tmp_path / "runs", run("plain", 0, 1 / 3), run("plain", 1, 0.2, corpus={"sha256": "1" * 64}))
    manifest(runs, "0", TEXT)
    manifest(runs, "1", TEXT | {"a": (False, "2")})
    before = write_page(load_sweep(runs), tmp_path / "before", (), "")
    for path in [*runs.rglob("*.json")]:
        path.with_suffix(".json.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    after = write_page(load_sweep(runs), tmp_path / "after", (), "")
    for name in ("README.md", "results.csv"):
        assert (after.parent / name).read_bytes() == (before.parent / name).read_bytes()
    write(runs, run("plain", 0, 1 / 3))
    with pytest.raises(ValueError, match=r"plain-0\.json\.xz: plain with seed 0 is there twice"):
        load_sweep(runs)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_manifest_that_is_none_is_named(tmp_path, text):
    directory = write(tmp_path, run("plain", 0, 0.1))
    (directory / "corpora").mkdir()
    (directory / "corpora" / "torn.json").write_text(text)
    with pytest.raises(ValueError, match=r"torn.json: expected a corpus's manifest"):
        load_sweep(directory)


def test_the_page_says_every_number_and_every_verdict(sweep, tmp_path):
    page = write_page(sweep, tmp_path / "page", (claim("better", "plain"), claim("absent", "plain")), "Much.").read_text()
    assert (
        page.startswith("# The comparison at 1K parameters\n")
        and "mean over seeds ± their standard deviation" in page
        and ", one recipe and for" in page
    )
    assert "Of 2 claims: 1 × holds, 1 × not run." in page
    assert "| Plain | 3 | 2.000 ± 0.000 | 60 ± 10 | 60 ± 10 | 10 | 64 B |" in page
    # above chance: (0.6 − 0.1)/0.9 and so on; 0.2033 of shares are 22.6 of what lies above chance
    assert "| 78 ± 11 | 56 ± 11 | +22.6 ± 1.6 | 0.00027 | 3 |  | **holds** |" in page and "**not run**" in page
    assert page.endswith("## What this cannot say\n\nMuch.\n")
    assert {p.name for p in (tmp_path / "page").iterdir()} == {
        "README.md",
        "results.csv",
        "glance.png",
        "retrieval.png",
        "state.png",
        "positions.png",
    }


def test_one_seed_has_no_spread_and_the_page_says_so(tmp_path):
    runs = write(tmp_path / "runs", run("plain", 0, 0.5), run("better", 0, 0.7))
    page = write_page(load_sweep(runs), tmp_path / "page", (claim("better", "plain"),), "").read_text()
    assert "1 seed each" in page and "No number has a spread" in page and not re.search(r"[0-9] ± [0-9]", page)


def test_a_run_that_its_guard_ended_is_told_and_counts_nowhere(tmp_path):
    ended = run("better", 1, 0.9) | {"ended": {"step": 199, "steps": 1200, "why": "the loss is nan, of model.blocks.0"}}
    lost = run("other", 0, 0.9) | {"ended": {"step": 2, "steps": 1200, "why": "a leap"}}
    for of in (ended, lost):
        for key in ("loss", "parameters", "train", "state_bytes", *TASKS):
            del of[key]
    directory = write(tmp_path / "runs", *(run("plain", s, 0.5) for s in (0, 1)), run("better", 0, 0.7), ended, lost)
    sweep = load_sweep(directory)
    assert len(sweep.runs["better"]) == 1 and "other" not in sweep.runs
    assert judge(sweep, [claim("better", "plain")])[0].difference.n == 1
    assert judge(sweep, [claim("other", "plain")])[0].word == "ended early"
    assert judge(sweep, [claim("absent", "plain")])[0].word == "not run"
    page = write_page(sweep, tmp_path / "page", (claim("other", "plain"),), "").read_text()
    assert (
        "| Better | 1 | abc | 199 of 1,200 | the loss is nan, of model.blocks.0 |" in page
        and "| Other | 0 | abc | 2 of" in page
    )
    with pytest.raises(ValueError, match=r"no runs there .* ended early or are void"):
        load_sweep(write(tmp_path / "none", lost))


def test_a_run_from_a_copy_without_its_history_is_said_to_be_one(tmp_path):
    """As `ran.json` has it where there is no git."""
    directory = write(tmp_path / "runs", run("plain", 0, 0.5, commit=None), run("plain", 1, 0.5))
    page = write_page(load_sweep(directory, (), {"One": ("plain",)}), tmp_path / "page", (), "")
    assert "code abc, of no known commit" in page.read_text()


def test_equal_runs_give_equal_pages(sweep, tmp_path):
    pages = [write_page(sweep, tmp_path / name, (), "").parent for name in "ab"]
    for name in ("README.md", "glance.png", "retrieval.png", "state.png"):
        assert (pages[0] / name).read_bytes() == (pages[1] / name).read_bytes()


def test_a_long_label_beside_the_states_is_whole(tmp_path, monkeypatch):
    runs = [run("long", s, (0.9, 0.1, 0.6)[s], title="A mixer with quite a long title, every 4th") for s in range(3)]
    sweep, drawn = load_sweep(write(tmp_path / "runs", *runs)), []
    monkeypatch.setattr(sweep_figures, "_save", lambda figure, path: drawn.append(figure))
    sweep_figures.retrieval_by_state(sweep, tmp_path / "state.png", tuple(TASKS), (128,))
    (label,) = (text for text in drawn[0].axes[0].texts if text.get_text().startswith("A mixer"))
    assert label.get_text().endswith("every 4th 90 / 10 / 60 %")
    assert label.get_window_extent().x1 <= drawn[0].bbox.x1


def test_runs_that_learned_and_runs_that_did_not_are_shown_one_by_one(tmp_path):
    """The mean of 0.1, 0.9 and 0.95 is like none of them; 0.5, 0.6 and 0.7 are one group."""
    one, other = [run("split", s, (0.9, 0.1, 0.95)[s]) for s in range(3)], [run("whole", s, 0.5 + 0.1 * s) for s in range(3)]
    sweep = load_sweep(write(tmp_path / "runs", *one, *other))
    assert sweep.split("split", ("needle",), 128) and not sweep.split("whole", ("needle",), 128)
    page = write_page(sweep, tmp_path / "page", (claim("split", "whole"),), "").read_text()
    assert "| Split | 90 / 10 / 95 | 90 / 10 / 95 |" in page and "| Whole | 60 ± 10 | 60 ± 10 |" in page
    assert "| 89 / 0 / 94 | 56 ± 11 |" in page  # in the claim, above chance


def test_void_runs_are_in_no_number_and_the_page_says_why(tmp_path):
    void = {"better": Void("never set", ("ab",)), "other": Void("rerun since", ("abc",))}
    runs = [run("plain", s, 0.5) for s in range(2)] + [run("better", s, 0.9731) for s in range(2)]
    runs += [run("other", s, 0.7, commit="def") for s in range(2)]
    sweep = load_sweep(write(tmp_path / "runs", *runs), ("better", "plain"), FAMILIES, ("better",), void)
    assert list(sweep.runs) == ["plain", "other"] and [r["seed"] for r in sweep.void["better"]] == [0, 1]
    verdicts = judge(sweep, [claim("better", "plain"), claim("plain", "better"), claim("other", "plain")])
    assert [v.word for v in verdicts] == ["void", "void", "holds"] and verdicts[0].difference is None
    page = write_page(sweep, tmp_path / "page", (claim("better", "plain"),), "").read_text()
    assert (
        "**Void: Better**" in page
        and "| Better | 0, 1 | abc | never set |" in page
        and "97" not in page
        and "other" not in page
    )
    assert "| better finds more than plain | needle at 1×, 2× |  |  |  |  |  |  | **void** |" in page


def test_a_run_of_no_known_code_counts(tmp_path):
    runs = write(tmp_path, run("plain", 0, 0.5, commit=None))
    assert load_sweep(runs, void={"plain": Void("", ("abc",))}).void == {}


def test_where_all_runs_are_void_there_is_no_page(tmp_path):
    with pytest.raises(ValueError, match="ended early or are void"):
        load_sweep(write(tmp_path, run("plain", 0, 0.5)), void={"plain": Void("", ("abc",))})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks": []}, "tasks is empty"),
        ({"needle": {"128": {"accuracy": 0.5}}}, "needle misses the length 256"),
        ({"loss": {"128": 2.0}}, "loss misses the length 256"),
        ({"uuid": {"128": {"accuracy": math.nan}, "256": {"accuracy": 0.5}}}, "uuid at 128 has the accuracy nan"),
        ({"uuid": {"128": {"accuracy": 50}, "256": {"accuracy": 0.5}}}, "uuid at 128 has the accuracy 50"),
        ({"uuid": {"128": {}, "256": {"accuracy": 0.5}}}, "uuid at 128 has the accuracy None"),
    ],
)
def test_a_run_whose_scores_are_none_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"plain-0.json: {message}"):
        load_sweep(write(tmp_path, run("plain", 0, 0.1, **changes)))


@pytest.mark.parametrize("text, message", [("{", "no JSON"), ("[" * 99_999, "no JSON"), ("[1]", "an object, got list")])
def test_a_result_that_is_none_is_named(tmp_path, text, message):
    (write(tmp_path, run("plain", 0, 0.1)) / "torn-0.json").write_text(text)
    with pytest.raises(ValueError, match=rf"torn-0.json: .*{message}"):
        load_sweep(tmp_path)


def test_two_results_of_one_run_are_refused(tmp_path):
    write(tmp_path, run("plain", 0, 0.1))
    (tmp_path / "plain-again.json").write_text(json.dumps(run("plain", 0, 0.9)))
    with pytest.raises(ValueError, match=r"plain-again.json: plain with seed 0 is there twice"):
        load_sweep(tmp_path)


def test_the_page_says_what_differs_between_recipes_and_between_lengths_of_training(tmp_path):
    of = lambda lr, seed: {"config": {"train": {"optim": {"lr": lr}, "seed": seed}, "phases": [{"steps": 2}], "model": lr}}
    short = run("plain", 0, 0.5)["train"] | {"tokens": 7}
    runs = write(tmp_path / "runs", run("plain", 0, 0.5, train=short, **of(1e-3, 0)), run("better", 1, 0.5, **of(2e-3, 1)))
    page = write_page(load_sweep(runs), tmp_path / "page", (), "").read_text()
    assert ", 7 to 10 training tokens of" in page and "recipes that differ in train.optim.lr and" in page
    assert "No claim was made before the runs." in page and "1 seed each" in page


def test_seeds_are_in_order_however_their_files_are_called(tmp_path):
    runs = write(tmp_path, *(run("plain", s, s / 20) for s in (10, 2, 0)))
    assert load_sweep(runs).accuracy("plain", "needle", 128).values == (0.0, 0.1, 0.5)


def test_a_diagnosis_that_is_no_number_is_a_dash(tmp_path):
    runs = [
        run(
            "plain",
            0,
            0.5,
            diagnostics={"carve": [{"content": math.nan, "staleness": 0.5}, {"content": 1.0, "staleness": 1.0}]},
        )
    ]
    page = write_page(load_sweep(write(tmp_path / "runs", *runs)), tmp_path / "page", (), "").read_text()
    assert "| Plain | – | 0.75 |" in page and "nan" not in page


def test_the_csv_of_a_sweep_has_a_row_a_seed(sweep, tmp_path):
    page = write_page(sweep, tmp_path / "page", (), "")
    rows = list(csv.DictReader((tmp_path / "page" / "results.csv").read_text().splitlines()))
    assert len(rows) == 9 * 2 * 2 and "[results.csv](results.csv)" in page.read_text()
    found = {(r["mixer"], r["seed"], r["task"], r["length"]): float(r["accuracy"]) for r in rows}
    assert found["other", "1", "uuid", "256"] == 0.1 and found["better", "1", "needle", "128"] == 0.81
    assert {r["commit"] for r in rows} == {"abc"}
