"""Whose a directory is: one process's, and one config's once it has a checkpoint or a result."""

import json

import pytest

from needlework.experiment.claim import RunError, claimable, claimed, differences
from needlework.train import InUse, alone

CONFIG = {"carve-1.3b": {"train": {"seed": 0, "steps": 5}}, "plain": {"train": {"seed": 0}}}
OTHER = {"carve-1.3b": {"train": {"seed": 1, "steps": 5}}, "plain": {"train": {"seed": 0}}}


def there(run):
    return json.loads((run / "config.json").read_text())


def test_a_config_may_change_until_there_is_a_checkpoint_or_a_result(tmp_path):
    run = tmp_path / "run"
    claimable(run, CONFIG)
    assert not run.exists()
    with claimed(run, CONFIG) as anew:
        assert not anew and there(run) == CONFIG
    with claimed(run, OTHER) as anew:
        assert anew == ["carve-1.3b.train.seed"] and there(run) == OTHER
    (run / "carve-1.3b" / "training" / "step-00000005.tmp").mkdir(parents=True)  # which a kill left
    (run / "plain" / "training" / "step-00000005").mkdir(parents=True)  # another run's, whose config does not change
    with claimed(run, CONFIG) as anew:
        assert anew == ["carve-1.3b.train.seed"]


@pytest.mark.parametrize("work", ["training/step-00000005/manifest.json", "result.json"])
def test_work_of_another_config_is_refused_by_its_fields(tmp_path, work):
    with claimed(tmp_path, CONFIG):
        pass
    file = tmp_path / "carve-1.3b" / work
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    for ask in (claimable, lambda *a: claimed(*a).__enter__()):
        with pytest.raises(RunError, match=r"another config \(carve-1\.3b\.train\.seed\)"):
            ask(tmp_path, OTHER)
        with pytest.raises(RunError, match=r"another config \(carve-1\.3b\)"):  # its work would be left out
            ask(tmp_path, {"plain": CONFIG["plain"]})
        assert there(tmp_path) == CONFIG
    with claimed(tmp_path, CONFIG | {"third": {}}) as anew:
        assert not anew


def test_a_directory_that_another_process_has_is_refused_at_once(tmp_path):
    with claimed(tmp_path, CONFIG):
        with pytest.raises(InUse, match="is in use by process"):
            claimable(tmp_path, CONFIG)
        with pytest.raises(InUse), claimed(tmp_path, OTHER):
            pass
    assert there(tmp_path) == CONFIG
    claimable(tmp_path, CONFIG)
    with alone(tmp_path):  # asking has kept nothing
        pass


def test_a_torn_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"plain": {"tr')
    with pytest.raises(ValueError, match=r"config\.json"):
        claimable(tmp_path, CONFIG)


def test_differences_are_paths_of_fields():
    assert sorted(differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}})) == ["a.c", "d"]
