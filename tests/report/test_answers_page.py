"""The page of a study that asked before it ran: of nothing, and of hand-made runs whose verdicts are known."""

import pytest

from needlework.experiment.pack import write_pack
from needlework.recipes.study import EXPERIMENTS, page
from needlework.recipes.study import forks as planned
from needlework.report.answers_page import write_answers

COMMON = {"machine": "a GPU", "train": {"seconds": 60.0, "loss": []}}


def capacity():
    """CCQ recalls 70 % and its partner 50 %; the curve has two sizes more."""
    found = []
    for name, share in (("ccq", 0.7), ("gated-deltanet-wide", 0.5), ("ccq-16", 0.4), ("gated-deltanet-wide-16", 0.3)):
        size = 4096 if name.endswith("16") else 16_384
        for seed in range(8 if "-16" not in name else 2):
            score = {"accuracy": share + 0.002 * (seed % 3), "nll": 1.0}
            found.append(
                {"name": name, "seed": seed, "title": name.upper(), "capacity": score, "state_bytes": {"512": size}} | COMMON
            )
    return found


def forks():
    """Q-Delta and its trunk are alike; CARVE's runs lie far apart; one trunk of CARVE passed its gate too late."""
    found = []
    for trunk, branch, apart in (("gated-deltanet", "qdelta", 0.001), ("carve-blind", "carve", 0.3)):
        for seed in planned.SEEDS:
            nll = {
                name: {"recall": {"2048": {"nll": x, "overwritten": {"nll": x}}}} | COMMON
                for name, x in (("itself", 0.5), (branch, 0.5 + apart * (-1) ** seed))
            }
            found.append(
                {"name": trunk, "seed": seed, "title": trunk, "gate": {"step": 200 + seed, "most": planned.BY}, "branches": nll}
                | COMMON
            )
    found[-1] |= {"gate": {"step": planned.BY + 1, "most": planned.BY}, "branches": {}}
    return found


def written(packs, folder):
    return write_answers(page.PAGE, packs, folder).read_text()


def test_until_runs_are_in_every_claim_is_not_run_yet(tmp_path):
    text = written({name: [] for name in EXPERIMENTS}, tmp_path)
    assert "6 × not run yet" in text and len(text.replace("|", " ").split()) < 900  # read in three minutes
    for about in page.ADVICE:
        assert f"## {about}: not run yet" in text
    assert not list(tmp_path.glob("*.png")) and "| not known | CCQ | not run yet |" in text
    assert "[first study](first/README.md)" in text


def test_a_claim_has_its_verdict_its_effect_its_interval_and_a_picture(tmp_path):
    packs = {name: [] for name in EXPERIMENTS} | {"capacity": capacity(), "forks": forks()}
    text = written(packs, tmp_path / "a")
    assert "## CCQ: holds" in text and "+20.0 ± 0.2 points" in text  # of 8 and 8: sd 0.16 points, 2.14 · 0.16 · √(2/8)
    assert "| +20.0 ± 0.2 points | < 0.0001 | 8 of 8 | **holds** |" in text and "| +0.000 ± 0.001 nats a digit | 1 |" in text
    assert "CCQ: 70.2 (70.0 to 70.4). GATED-DELTANET-WIDE: 50.2 (50.0 to 50.4) points." in text  # the runs' titles
    assert "## Q-Delta: negligible" in text and "## CARVE: undecided" in text and "## LUCID: not run yet" in text
    assert "3 × not run yet, 1 × holds, 1 × negligible, 1 × undecided" in text
    assert "Only 7 of 8 pairs are scored: the rest did not pass the gate, or their guard ended them." in text
    assert "| many pairs in a small fixed state | CCQ on Gated DeltaNet | CCQ | holds |" in text
    assert "either; Gated DeltaNet is the simpler one" in text and "7 of 8 runs passed their gate in time" in text
    pictures = {path.name for path in (tmp_path / "a").glob("*.png")}
    assert pictures == {"ccq.png", "q-delta.png", "carve.png", "bytes.png"}
    behind = (tmp_path / "a" / "runs.md").read_text()
    assert (
        "| forks | 16 | 46 | 15 of 16 by step 1080 | a GPU |" in behind
        and "| CCQ against Gated DeltaNet, from one trunk |" in behind
    )
    written(packs, tmp_path / "b")
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in (*pictures, "README.md", "runs.md")
    )


def test_the_command_makes_it_of_packs(needlework, tmp_path):
    write_pack(tmp_path / "capacity.jsonl.xz", {f"{e['name']}-{e['seed']}": e for e in capacity()})
    printed = needlework("report", tmp_path, "--of", "study.page", "--to", tmp_path / "page")
    assert "page: " in printed and "## CCQ: holds" in (tmp_path / "page" / "README.md").read_text()
    assert "no such folder of packs" in needlework("report", tmp_path / "none", "--of", "study.page", ok=False)


@pytest.mark.parametrize("about", page.ADVICE)
def test_every_claim_has_its_advice(about):
    assert [claim.about for claim in page.PRIMARY].count(about) == 1
