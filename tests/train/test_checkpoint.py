import json
import re
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from needlework.train import CheckpointError, World, checkpoint

CONFIG = {"optim": {"kind": "adamw", "lr": 0.1}, "betas": (0.9, 0.95)}


DATA = "__0_0.distcp"  # what torch.distributed.checkpoint calls the file of the first rank


def save(directory, step, config=CONFIG, keep=2, background=False):
    with checkpoint.Checkpoints(directory, config, keep, World(), background) as checkpoints:
        checkpoints.save(step, {"w": torch.full((4,), float(step)), "step": torch.tensor(step), "none": torch.zeros(0)})
        return checkpoints.wait()


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in a thread"])
def test_what_was_saved_is_loaded(tmp_path, background):
    save(tmp_path, 3, background=background)
    state = checkpoint.load(checkpoint.latest(tmp_path, CONFIG))
    assert state["step"] == 3 and torch.equal(state["w"], torch.full((4,), 3.0)) and not len(state["none"])


def test_what_is_written_in_the_background_is_the_state_at_the_call(tmp_path, monkeypatch):
    """The writing waits until the weights have changed."""
    changed, w = threading.Event(), torch.zeros(100)
    write = dcp.state_dict_saver.save

    def later(*arguments, **named):
        assert changed.wait(60)
        return write(*arguments, **named)

    monkeypatch.setattr(dcp.state_dict_saver, "save", later)
    with checkpoint.Checkpoints(tmp_path, CONFIG, 2, World(), background=True) as checkpoints:
        checkpoints.save(1, {"w": w})
        w.fill_(1.0)
        assert checkpoint.latest(tmp_path) is None
        changed.set()
        assert checkpoint.load(checkpoints.wait())["w"].count_nonzero() == 0


def test_only_what_is_asked_for_is_loaded_and_in_place(tmp_path):
    path, w = save(tmp_path, 3), torch.zeros(4)
    assert checkpoint.load(path, {"w": w}).keys() == {"w"} and w[0] == 3
    with pytest.raises(CheckpointError, match=r"step-00000003 cannot be read: .*absent"):
        checkpoint.load(path, {"absent": torch.zeros(1)})


def test_what_holds_more_than_tensors_is_refused(tmp_path):
    dcp.save({"weight": torch.ones(2), "note": "not a tensor"}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(CheckpointError, match="note is stored as BytesStorageMetadata, expected tensors alone"):
        checkpoint.load(tmp_path / "other")


def test_the_manifest_says_which_commit_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setattr("needlework.train.manifest.commit", lambda: {"commit": "abc", "dirty": True})
    manifest = json.loads((save(tmp_path, 1) / "manifest.json").read_text())
    assert manifest["commit"] == "abc" and manifest["dirty"] and set(manifest["files"]) == {DATA, ".metadata"}


def test_only_the_newest_stay(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path, CONFIG) is None
    assert checkpoint.latest(tmp_path / "absent", CONFIG) is None


def flip_a_bit(path):
    data = bytearray((path / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (path / DATA).write_bytes(data)


def cut(path):
    data = (path / DATA).read_bytes()
    (path / DATA).write_bytes(data[:-100])


def remove_the_manifest(path):
    (path / "manifest.json").unlink()


def remove_torch_s_own(path):
    (path / ".metadata").unlink()


def cut_the_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[:40])


def edit_the_config(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("0.95", "0.96"))


DAMAGE = {
    flip_a_bit: f"{DATA} does not match its sha256",
    cut: f"{DATA} has .* bytes, .* were written",
    remove_torch_s_own: ".metadata: No such file",
    remove_the_manifest: "manifest.json: No such file",
    cut_the_manifest: "manifest.json cannot be read",
    edit_the_config: "config in manifest.json does not match its sha256",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, damage):
    before = save(tmp_path, 1)
    damage(save(tmp_path, 2))
    with pytest.warns(UserWarning, match=rf"step-00000002 is damaged \(.*{DAMAGE[damage]}.*\); step-00000001 is used instead"):
        assert checkpoint.latest(tmp_path, CONFIG) == before


def test_when_all_are_damaged_it_says_so_and_starts_nothing(tmp_path):
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step))
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole: step-00000002 .*; step-00000001"):
        checkpoint.latest(tmp_path, CONFIG)


def test_a_damaged_checkpoint_is_replaced_and_never_counts_as_one_to_keep(tmp_path):
    for step in (1, 2, 4):
        save(tmp_path, step, keep=3)
    save(tmp_path, 3, keep=2)  # as a run does that found 4 damaged
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_half_written_checkpoint_is_ignored_and_cleared_away_by_the_next(tmp_path):
    before = save(tmp_path, 1)
    (tmp_path / "step-00000002.tmp").mkdir()
    (tmp_path / "step-00000002.tmp" / DATA).write_bytes(b"half")
    assert checkpoint.latest(tmp_path, CONFIG) == before
    save(tmp_path, 3)
    assert not list(tmp_path.glob("*.tmp"))


def test_another_config_is_refused_and_the_differing_fields_are_named(tmp_path):
    save(tmp_path, 1)
    other = {"optim": {"kind": "muon", "lr": 0.1}, "betas": (0.9, 0.95), "clip": 1.0}
    expected = "(clip: 'absent' there, 1.0 here; optim.kind: 'adamw' there, 'muon' here)"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        checkpoint.latest(tmp_path, other)


def test_a_config_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.latest(tmp_path, {"corpus": object()})


def test_another_format_is_refused(tmp_path):
    manifest = save(tmp_path, 1) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, expected 2: another version of needlework"):
        checkpoint.latest(tmp_path, CONFIG)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in a thread"])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_disk_leaves_the_previous_checkpoint_and_nothing_half_written(tmp_path, monkeypatch, call, background):
    def fail(*_):
        raise OSError(28, "No space left on device")

    before = save(tmp_path, 1)
    target = {"fsync": "os.fsync", "rename": "pathlib.Path.rename"}[call]
    with monkeypatch.context() as patched:
        patched.setattr(target, fail)
        with pytest.raises(
            CheckpointError, match=r"step-00000002 could not be written .*No space left.*step-00000001 is untouched"
        ):
            save(tmp_path, 2, background=background)
    assert [p.name for p in tmp_path.iterdir()] == [before.name]
    assert checkpoint.latest(tmp_path, CONFIG) == before
