"""Packages to an archive and an archive to a corpus: each document once, on its side, no package over its share."""

import json
import lzma
import shutil
import subprocess

import pytest

from needlework.data import Archive, SourceError, StoreConfig, prepare
from needlework.data.debian import KNOWN, licence_of, texts, unpacked
from needlework.data.gather import Gathered, Split, gather, of_python
from needlework.data.packages import Packages

SPLIT = Split(held_out=0.2, development=0.1, other=("apart",))


def lines(package, name, n=6):
    return "".join(f"line {i} of {package}, in {name}, is a long one\n" for i in range(n))


def packages(names="abcdefghijkl", documents=20):
    return [
        Gathered(p, f"{p} 1", "MIT", [(f"{d}.txt", lines(p, f"{d}.txt")) for d in range(documents)]) for p in (*names, "apart")
    ]


def records(folder):
    with lzma.open(folder / "documents.jsonl.xz", "rt") as file:
        return [json.loads(line) for line in file]


def test_documents_are_on_the_sides_that_their_names_decide(tmp_path):
    manifest = gather(packages(), tmp_path, SPLIT, 0.1)
    found = records(tmp_path)
    assert {r["side"] for r in found if r["package"] == "apart"} == {"other"}
    count = {
        side: sum(r["side"] == side for r in found if r["package"] != "apart") for side in ("train", "held_out", "development")
    }
    assert sum(count.values()) == 240 and 30 < count["held_out"] < 70 and 10 < count["development"] < 40
    assert all(r["side"] == SPLIT.side(r["package"], r["name"]) for r in found)
    fewer = gather(packages("abcdefghij", 10), tmp_path / "fewer", SPLIT, 0.1)
    assert {(r["package"], r["name"], r["side"]) for r in records(tmp_path / "fewer")} <= {
        (r["package"], r["name"], r["side"]) for r in found
    }
    entry = next(p for p in manifest["packages"] if p["name"] == "apart")
    assert (entry["of"], entry["licence"], entry["files"], entry["held_out"]) == ("apart 1", "MIT", 20, True)
    assert sum(p["bytes"] for p in fewer["packages"]) == sum(len(r["text"]) for r in records(tmp_path / "fewer"))


def test_equal_packages_give_equal_bytes_in_whatever_order_they_come(tmp_path):
    a = gather(packages(), tmp_path / "a", SPLIT, 0.1)
    b = gather(reversed(packages()), tmp_path / "b", SPLIT, 0.1)
    assert a == b


def test_repetitions_and_copies_are_left_out_of_training_first(tmp_path):
    """A training document of which most is in a held-out one goes; one of which half is stays; a copy of training text goes too."""
    made = packages()
    held = next(name for name, _ in made[0].documents if SPLIT.side("a", name) == "held_out")
    kept = next(name for name, _ in made[1].documents if SPLIT.side("b", name) == "train")
    of_held, of_kept = lines("a", held).splitlines(keepends=True), lines("b", kept).splitlines(keepends=True)
    training = (name for name in map(str, range(99)) if SPLIT.side("zz", name) == "train")
    own = lines("zz", "own").splitlines(keepends=True)
    extra = {
        "same": "  " + lines("a", held),
        "most": "".join(of_held[:4] + own[:2]),
        "half": "".join(of_held[:3] + own[:3]),
        "copy": "".join(of_kept[:4] + own[4:]),
    }
    names = {what: next(training) for what in extra}
    manifest = gather([*made, Gathered("zz", "zz", "", [(names[w], t) for w, t in extra.items()])], tmp_path, SPLIT, 0.1)
    assert [r["name"] for r in records(tmp_path) if r["package"] == "zz"] == [names["half"]]
    sizes = {what: len(text) for what, text in extra.items()}
    assert manifest["left_out"] == {"repeated": sizes["same"], "copies": sizes["most"] + sizes["copy"]}
    assert {(r["package"], r["name"]) for r in records(tmp_path)} >= {("a", held), ("b", kept)}


def test_no_package_is_over_its_share_of_what_is_kept(tmp_path):
    big = Gathered("big", "", "", [(str(i), lines("big", str(i))) for i in range(400)])
    manifest = gather([*packages(), big], tmp_path, SPLIT, 0.1)
    sizes = {p["name"]: p["bytes"] for p in manifest["packages"]}
    assert 0.09 < sizes["big"] / sum(sizes.values()) <= 0.1 and manifest["left_out"]["capped"] > 0
    with pytest.raises(ValueError, match=r"expected packages of at most 0\.1 of the text each, which 3 packages cannot be"):
        gather(packages("ab"), tmp_path / "few", SPLIT, 0.1)


def test_an_archive_becomes_a_corpus_with_its_four_sides(tmp_path):
    copied = Gathered("copied", "", "", [("0", lines("a", "0.txt", 5))])
    manifest = gather([*packages(), copied], tmp_path / "text", SPLIT, 0.1)
    source = Archive(path=str(tmp_path / "text"), sha256=manifest["sha256"])
    corpus = prepare(StoreConfig(source=source, tokenizer="bytes"), tmp_path / "corpus")
    text = lambda side: [bytes(d[:-1].astype("uint8")).decode() for d in (side[i] for i in range(len(side)))]
    found = records(tmp_path / "text")
    sides = {"train": corpus.train, "held_out": corpus.held_out, **corpus.others}
    assert list(sides) == ["train", "held_out", "development", "other"]
    for name, side in sides.items():
        assert text(side) == [r["text"] for r in found if r["side"] == name]
        assert corpus.manifest["totals"][f"{name}_tokens"] == len(side.tokens)
    assert corpus.on("other").held_out is corpus.others["other"] and corpus.on("held_out") is corpus
    with pytest.raises(ValueError, match="there is no side 'test'; it has held_out, development, other"):
        corpus.on("test")
    assert corpus.manifest["files"][0].keys() >= {"name", "of", "licence", "sha256", "held_out"}
    assert corpus.manifest["totals"]["bytes_copies"] == manifest["left_out"]["copies"] > 0
    with pytest.raises(SourceError, match=r"the recipe says 0{16}…: another text"):
        prepare(StoreConfig(source=Archive(path=str(tmp_path / "text"), sha256="0" * 64), tokenizer="bytes"), tmp_path / "c")
    (tmp_path / "text" / "documents.jsonl.xz").write_bytes(b"")
    with pytest.raises(SourceError, match="its manifest says"):
        prepare(StoreConfig(source=Archive(path=str(tmp_path / "text")), tokenizer="bytes"), tmp_path / "d")
    with pytest.raises(SourceError, match=r"there is no .*documents\.jsonl\.xz; `needlework gather"):
        prepare(StoreConfig(source=Archive(path=str(tmp_path / "none")), tokenizer="bytes"), tmp_path / "e")


def test_installed_packages_say_their_release_and_licence(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("x = 'a'\n")
    (tmp_path / "__editable___two_finder.py").write_text("path = '/home'\n")
    info = tmp_path / "one-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: one\nVersion: 2.0\nLicense-Expression: BSD-3-Clause\n")
    (info / "RECORD").write_text("one/a.py,,\n")
    found = list(of_python(Packages(roots=(str(tmp_path),))))
    assert found == [Gathered("one", "one 2.0", "BSD-3-Clause", [("one/a.py", "# one/a.py\nx = 'a'\n")])]
    assert not list(of_python(Packages(roots=(str(tmp_path),)), without=("one",)))


def test_a_licence_that_the_copyright_file_no_longer_says_is_refused():
    assert licence_of("wordnet-base", "Files: *\nLicense:\n WordNet3.0") == "WordNet-3.0"
    for name in KNOWN:
        with pytest.raises(SourceError, match=f"the copyright file of {name} does not say"):
            licence_of(name, "All rights reserved.")
    with pytest.raises(SourceError, match="vim is not known here"):
        unpacked("vim", None)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")
def test_a_debian_package_is_unpacked_and_read(tmp_path):
    root = tmp_path / "root"
    for name, text in {
        "DEBIAN/control": "Package: wordnet-base\nVersion: 9\nArchitecture: all\nMaintainer: A <a@b.c>\nDescription: x\n",
        "usr/share/doc/wordnet-base/copyright": "License: WordNet3.0\n",
        **{
            f"usr/share/wordnet/data.{kind}": "00000001 04 n 01 a_word 0 000 | a gloss  \n" * 3
            for kind in ("noun", "verb", "adj", "adv")
        },
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "debs").mkdir()
    subprocess.run(["dpkg-deb", "-b", root, tmp_path / "debs" / "wordnet-base_9_all.deb"], check=True, capture_output=True)
    deb = unpacked("wordnet-base", tmp_path / "debs")
    assert (deb.version, deb.licence, len(deb.sha256)) == ("9", "WordNet-3.0", 64)
    assert list(texts(deb)) == [(f"{k}.04.000000", "a word (noun): a gloss\n" * 3) for k in ("adj", "adv", "noun", "verb")]
