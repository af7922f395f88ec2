"""results.json comes back as it was written, and says what is wrong with it."""

import pytest

from needlework.report import load_results, save_results
from needlework.report.results import check_results


def test_results_come_back_as_they_were_written(example, tmp_path):
    save_results(example(), tmp_path / "run" / "results.json")
    assert load_results(tmp_path / "run" / "results.json") == example()


@pytest.mark.parametrize("key", ["name", "lengths", "corpus", "mixers"])
def test_a_missing_key_is_named(example, key):
    results = example()
    del results[key]
    with pytest.raises(ValueError, match=f"results misses the key '{key}'"):
        check_results(results)


def test_a_missing_key_deep_inside_is_named_with_its_mixer(example):
    results = example()
    del results["mixers"][2]["needle"]["512"]["exact"]
    with pytest.raises(ValueError, match=r"mixers\[2\].needle\['512'\] misses the key 'exact'"):
        check_results(results)


def test_a_missing_length_is_named(example):
    results = example()
    del results["mixers"][1]["loss"]["2048"]
    with pytest.raises(ValueError, match=r"mixers\[1\].loss misses the key '2048'"):
        check_results(results)


def test_one_value_is_enough_and_none_is_refused(example):
    results = example()
    score = results["mixers"][0]["needle"]["512"]
    score["values"] = 1
    check_results(results)
    score["values"] = 0
    with pytest.raises(ValueError, match="digits and values must be at least 1"):
        check_results(results)


def test_a_wrong_type_is_named(example):
    results = example()
    results["mixers"][0]["parameters"] = "many"
    with pytest.raises(ValueError, match=r"mixers\[0\].parameters must be int, got str"):
        check_results(results)


def test_steps_and_losses_go_in_pairs(example):
    results = example()
    results["mixers"][0]["train"]["loss"].pop()
    with pytest.raises(ValueError, match="1100 steps but 1099 losses"):
        check_results(results)


def test_a_loss_that_is_not_a_number_is_refused_and_the_old_file_stays(example, tmp_path):
    path = tmp_path / "results.json"
    save_results(example(), path)
    broken = example()
    broken["mixers"][0]["loss"]["256"] = float("nan")
    with pytest.raises(ValueError, match=r"loss\['256'\] must be finite"):
        save_results(broken, path)
    assert load_results(path) == example()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(example, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    save_results(example(), path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_results(example(mixers=1), path)
    assert load_results(path) == example()
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_file_is_an_error_that_names_it(example, tmp_path):
    path = tmp_path / "results.json"
    save_results(example(), path)
    path.write_text(path.read_text()[:1000])
    with pytest.raises(ValueError, match=r"results\.json: .*line"):
        load_results(path)
