"""Packages as documents: whole ones are held out, and nothing of them, or copied from them, is trained on."""

import platform

import pytest

from needlework.data import Packages
from needlework.data.corpus import is_held_out

LINES = [f"    result_{i} = compute_something_of(argument_{i}, other={i})" for i in range(60)]
TEXT = lambda start, stop: "\n".join(f"def f{i}():\n{LINES[i]}" for i in range(start, stop)) + "\n"
NAMES = [f"package{i}" for i in range(40)]
HELD = [name for name in NAMES if is_held_out(name, 0.25)]
KEPT = [name for name in NAMES if not is_held_out(name, 0.25)]


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def documents(source):
    joined, texts = {}, []
    for piece in source.stream():
        texts.append(piece.text)
        if piece.ends:
            assert piece.key not in joined
            joined[piece.key] = "".join(texts)
            texts = []
    assert texts == []
    return joined


def test_a_document_is_a_package_with_its_files_in_order(tmp_path):
    write(tmp_path, {"b/z.py": "z = 1\n", "b/a/y.py": "y = 1", "b/__init__.py": "", "c.py": "c = 1\n", "b/data.txt": "no"})
    expected = {"b": "# b/a/y.py\ny = 1\n# b/z.py\nz = 1\n", "c": "# c.py\nc = 1\n"}
    source = Packages(roots=(tmp_path,))
    assert documents(source) == expected
    assert {entry["name"]: entry["bytes"] for entry in source.listed()} == {name: len(text) for name, text in expected.items()}


def test_tests_tables_vendored_copies_and_what_is_no_text_are_left_out(tmp_path):
    write(
        tmp_path,
        {
            "a/keep.py": TEXT(0, 5),
            "a/tests/test_a.py": TEXT(5, 9),
            "a/_vendor/other/x.py": TEXT(9, 12),
            "a/table.py": "TABLE = [" + "1234567, " * 50 + "]",
            "a/latin.py": "é = 'é'".encode("latin-1"),
            "a/nul.py": b"x = '\0'",
            "a/blank.py": "\n \n",
            "a/same.py": TEXT(0, 5),
        },
    )
    (package,) = Packages(roots=(tmp_path,)).packages
    assert [name for name, _ in package.files] == ["a/keep.py"]


def test_the_list_says_what_to_install_for_a_package(tmp_path):
    record = "given/__init__.py,sha256=abc,9\nalone.py,,\ngiven-1.2.dist-info/RECORD,,\n"
    info = {"METADATA": "Metadata-Version: 2.1\nName: Given.Things\nVersion: 1.2\n", "RECORD": record}
    write(tmp_path, {f"given-1.2.dist-info/{name}": text for name, text in info.items()})
    write(tmp_path, {"given/__init__.py": TEXT(0, 3), "alone.py": TEXT(3, 6), "os.py": TEXT(6, 9)})
    of = {entry["name"]: entry["of"] for entry in Packages(roots=(tmp_path,)).listed()}
    assert of == {"given": "Given.Things 1.2", "alone": "Given.Things 1.2", "os": f"python {platform.python_version()}"}


def test_sides_are_whole_packages_by_name(tmp_path):
    write(tmp_path, {f"{name}/{part}.py": f"{name} = '{part}'\n" for name in NAMES for part in "ab"})
    source = Packages(roots=(tmp_path,))
    assert {package.name: package.held_out for package in source.packages} == {name: name in HELD for name in NAMES}
    assert 0 < len(HELD) < len(NAMES)
    assert set(documents(source)) == set(NAMES)
    order = list(documents(source))
    assert order != sorted(order) and order == list(documents(Packages(roots=(tmp_path,))))


def test_copies_of_held_out_text_are_not_trained_on(tmp_path):
    held, kept = HELD[0], KEPT[0]
    write(
        tmp_path,
        {
            f"{held}/a.py": TEXT(0, 20),
            f"{kept}/same.py": TEXT(0, 20),
            f"{kept}/fork.py": TEXT(5, 20) + TEXT(20, 30).replace("    ", "        "),
            f"{kept}/own.py": TEXT(40, 60) + TEXT(0, 15),
        },
    )
    texts = documents(Packages(roots=(tmp_path,)))
    assert texts[held] == f"# {held}/a.py\n{TEXT(0, 20)}"
    assert texts[kept] == f"# {kept}/own.py\n{TEXT(40, 60)}{TEXT(0, 15)}"


def test_a_stream_goes_on_inside_a_package(tmp_path):
    write(tmp_path, {f"{name}/{part}.py": f"{name} = '{part}'\n" for name in NAMES[:5] for part in "abc"})
    source = Packages(roots=(tmp_path,))
    whole = list(source.stream())
    for stop in range(1, len(whole)):
        stream, again = source.stream(), source.stream()
        pieces = iter(stream)
        for _ in range(stop):
            next(pieces)
        again.load_state_dict(stream.state_dict())
        assert list(again) == whole[stop:]


def test_a_root_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such directory: .*nowhere"):
        Packages(roots=(tmp_path / "nowhere",)).stream()
