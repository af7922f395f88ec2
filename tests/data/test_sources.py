"""Sources read through `datasets`, from files made here: order, place, keys, and what is said when they cannot be read."""

import gzip
import json
import os

import pytest

from needlework.data import DOLMA, FINEPDFS, FINEWEB_EDU_10BT, FINEWEB_EDU_100BT, Hub, Local, Piece, SourceError

pytestmark = pytest.mark.usefixtures("offline")
RECORDS = [{"id": f"id-{i}", "text": f"text {i} " * (1 + i % 7), "score": i} for i in range(250)]
PIECES = [Piece(record["id"], record["text"], True) for record in RECORDS]


def jsonl(path, records):
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def parquet(path, records):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(records)
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=40)


@pytest.fixture(params=["jsonl", "json.gz", "parquet", "hub"])
def source(request, tmp_path):
    """The same records, in three files of each format; "hub" is the way that Dolma is read."""
    ending = {"hub": "json.gz"}.get(request.param, request.param)
    for i in range(3):
        # Brackets are a pattern to `datasets`, and the name of a compressed file must not have any.
        path = tmp_path / (f"part{i}.{ending}" if ending.endswith("gz") else f"part {i} [a].{ending}")
        (parquet if ending == "parquet" else jsonl)(path, RECORDS[100 * i : 100 * i + 100])
    if request.param == "hub":
        return Hub(path="json", files=tuple(map(str, sorted(tmp_path.iterdir()))))
    return Local(paths=(tmp_path,))


def test_records_come_in_order_with_their_ids(source):
    assert list(source.stream()) == PIECES


@pytest.mark.parametrize("stop", [1, 37, 100, 177, 249])
def test_a_stream_goes_on_after_the_piece_that_came_last(source, stop):
    stream = source.stream()
    pieces = iter(stream)
    assert [next(pieces) for _ in range(stop)] == PIECES[:stop]
    state = json.loads(json.dumps(stream.state_dict()))
    again = source.stream()
    again.load_state_dict(state)
    assert list(again) == PIECES[stop:]


def test_fields_may_differ_from_record_to_record(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "one", "meta": {"a": 1}}, {"text": "two", "meta": [1], "more": "x"}])
    jsonl(tmp_path / "b.jsonl", [{"other": 1, "text": "three"}])
    (tmp_path / "c.jsonl").write_text('\n{"text": "half \\ud83e"}\n\n{"text": ""}\n')
    pieces = list(Local(paths=(tmp_path,)).stream())
    assert [piece.text for piece in pieces] == ["one", "two", "three", "half ?"]
    assert [piece.key for piece in pieces] == ["one", "two", "three", "half ?"]


def test_the_fields_with_text_and_key_are_chosen(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"content": "one", "url": 5, "id": "x"}])
    assert list(Local(paths=(tmp_path,), text="content", id="url").stream()) == [Piece("5", "one", True)]
    assert list(Local(paths=(tmp_path,), text="content", id=None).stream()) == [Piece("one", "one", True)]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.md").write_text("three\u2028four")
    assert [piece.text for piece in Local(paths=(tmp_path,)).stream()] == ["one\n\ntwo\n", "three\u2028four"]


def test_local_files_are_listed_with_size_and_digest(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("one")
    (entry,) = Local(paths=(tmp_path,)).listed()
    assert entry["name"] == "sub/a.txt" and entry["bytes"] == 3
    assert entry["sha256"].startswith("7692c3ad3540bb80")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": \n', r"a\.jsonl, line 2: no JSON"),
        ("a.jsonl", '{"text": "one"}\n{"text": ' + "[" * 100_000, r"a\.jsonl, line 2: no JSON"),
        ("a.jsonl", '["one"]\n', r"a\.jsonl, line 1: expected an object, got list"),
        ("a.jsonl", '{"content": "one", "x": 1}\n', r"record 1: .* field 'text', got NoneType; fields present: content, x"),
        ("a.jsonl", '{"text": 3}\n', r"field 'text', got int"),
        ("a.txt", "na\udcefve", r"a\.txt cannot be read .*UnicodeDecodeError"),
        ("a.parquet", "PAR1 and no more", r"a\.parquet cannot be opened: ArrowInvalid"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SourceError, match=message):
        list(Local(paths=(tmp_path / name,)).stream())


def test_no_files_and_mixed_formats_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Local(paths=(tmp_path / "nowhere",)).stream()
    with pytest.raises(ValueError, match=r"one format are expected in .*, found none"):
        Local(paths=(tmp_path,)).stream()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="found json, text"):
        Local(paths=(tmp_path,)).stream()


def test_without_a_network_the_data_set_is_named():
    with pytest.raises(SourceError, match=r"fineweb-edu \(sample-10BT\) cannot be found: OfflineModeIsEnabled"):
        FINEWEB_EDU_10BT.pinned()
    with pytest.raises(SourceError, match=r"the data set somebody/something cannot be opened: ConnectionError"):
        Hub(path="somebody/something", revision="main").stream()


def test_a_connection_that_breaks_names_the_data_set_and_the_place(tmp_path):
    jsonl(tmp_path / "a.jsonl", RECORDS)
    stream = Hub(path="json", files=(str(tmp_path / "a.jsonl"),)).stream()

    def breaking():
        for i in range(3):
            yield {"text": json.dumps(RECORDS[i])}
        raise ConnectionError("reset by peer")

    stream.data = breaking()
    with pytest.raises(SourceError, match=r"a\.jsonl … cannot be read after 3 records: ConnectionError: reset by peer"):
        list(stream)


def test_the_papers_data_sets_are_there():
    for source in (FINEWEB_EDU_10BT, FINEWEB_EDU_100BT, FINEPDFS):
        assert (source.path.split("/")[0], source.text, source.id) == ("HuggingFaceFW", "text", "id")
    assert len(set(DOLMA.files)) == 103 and DOLMA.pinned() is DOLMA


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 0.0}, r"held_out is 0.0, expected a number in \(0, 1\)"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_documents": 0}, "max_documents"),
    ],
)
def test_a_wrong_source_says_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        Local(paths=(os.devnull,), **settings)
