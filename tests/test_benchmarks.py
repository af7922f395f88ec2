"""The file of results adds up over runs, and the tables of docs/performance.md say what it holds."""

from needlework.recipes import comparison


def row(op="kda", passes="fwd", **changed):
    shape = {"B": 8, "T": 4096, "H": 16, "K": 128, "V": 128}
    figures = {"ms": 0.5, "peak_mib": 100.0, "peer": "p", "peer_ms": 1.0, "peer_peak_mib": 200.0, "ratio": 0.5, "floor_ms": 0.1}
    about = {"bar": 0.45, "error_over_budget": 0.4, "device": "D 1", "torch": "2", "triton": "3", "commit": "abc"}
    return {"op": op, "impl": "triton", "shape": shape, "dtype": "bfloat16", "pass": passes, **figures, **about} | changed


def test_rows_of_one_key_replace_each_other_and_others_stay(bench, tmp_path):
    results = bench("results")
    file = results.path("D 1", tmp_path)
    for new in (row(), row(passes="fwd+bwd"), row("gated"), row(ms=0.25)):
        results.put(file, new)
    assert [(r["op"], r["pass"], r["ms"]) for r in results.read(file)] == [
        ("kda", "fwd", 0.25), ("kda", "fwd+bwd", 0.5), ("gated", "fwd", 0.5)
    ]  # fmt: skip
    results.drop(file, "kda", row()["shape"])
    assert [r["op"] for r in results.read(file)] == ["gated"]
    assert [path.name for path in tmp_path.iterdir()] == ["d-1.json"]


def test_the_table_says_which_bars_are_met(bench):
    cold = row("ccq", "cold", ms=12_000.0, bar=10_000.0, ratio=None, peer_ms=None, peak_mib=None, error_over_budget=None)
    text = bench("table").section([row("carve", "step", ratio=0.9, bar=0.85), cold, row(), row("gated", ratio=0.4)])
    lines = {line.split(" | ")[0].strip("| "): line for line in text if line.startswith("|")}
    assert "0.45 NOT met" in lines["kda"] and "0.45 met" in lines["gated"] and "0.85 met" in lines["carve"]
    assert any("ccq 12.0 s (NOT met)" in line for line in text)


def test_a_share_of_a_ceiling_has_a_table_of_its_own(bench):
    share = row("polar/decode", "share", ratio=0.9, bar=0.85, peer="device copy")
    text = bench("table").section([share, row("lucid", "share", ratio=0.3, bar=0.42, peer="matrix product")])
    assert any("device copy | 90 % | 0.85 met" in line for line in text)
    assert any("matrix product | 30 % | 0.42 NOT met" in line for line in text)


def test_the_names_that_rows_are_asked_for_by_select_them(bench):
    keys = [case.key for case in bench("attention_cases").CASES] + [step.key for step in bench("steps").steps()]
    chosen = [key for key in keys if key.startswith(("lucid/", "polar/"))]
    assert len(chosen) == 15 and {key.split("/")[0] for key in chosen} == {"lucid", "polar"}


def test_the_tables_of_the_page_of_performance_are_made_from_the_files(bench):
    table, results = bench("table"), bench("results")
    for name, root, made in table.TABLES:
        text = table.PAGE.read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
        for path in root.glob("*.json"):
            for line in made(results.read(path)):
                assert line in text, f"run benchmarks/table.py: {line}"


def test_the_table_of_training_says_which_bars_are_met(bench):
    step = {"parameters": 125_000_000, "tokens_per_second": 4e5, "mfu": 0.36, "size": "125m", "shape": {"B": 64, "T": 2048}}
    slow = row("carve", **step | {"mfu": 0.29}, bar=0.3)
    long = step | {"shape": {"B": 2, "T": 65536}, "mfu": 0.1}
    far = [
        row(op, **long | {"tokens_per_second": n}, bar=None) for op, n in (("carve", 2.7e5), ("qdelta", 3.6e5), ("kda", 4e5))
    ]
    given = [row("qdelta", **step, bar=0.35), *far, slow]
    text = bench("table").training([r | {"impl": "needlework"} for r in given])
    line = lambda op, T: next(line for line in text if line.startswith(f"| {op} |") and f", {T:,} |" in line)
    assert "29.0% | 0.3 NOT met |  |  |" in line("carve", 2048) and "36.0% | 0.35 met |" in line("qdelta", 2048)
    assert "10.0% |  | 68% | 0.7 NOT met |" in line("carve", 65536) and "| 90% | 0.9 met |" in line("qdelta", 65536)
    assert "10.0% |  |  |  |" in line("kda", 65536)  # no shorter row to compare it with


def test_every_row_names_the_commit_that_was_measured(bench):
    table, results = bench("table"), bench("results")
    for root, made in ((results.ROOT, table.section), (table.TRAINING, table.training)):
        for path in root.glob("*.json"):
            rows = results.read(path)
            lines = [line for line in made(rows) if line.startswith("| ") and "---" not in line and "| commit |" not in line]
            commits = {r["commit"] for r in rows}
            assert lines and all(line.rsplit(" | ", 1)[1].removesuffix(" |") in commits for line in lines)


def test_every_long_bar_is_of_a_mixer_whose_state_is_fixed(bench):
    table, fixed = bench("table"), []
    for name in comparison.MIXERS:
        if all(mixer["kind"] == "recurrent" for mixer in comparison.model(name).mixers.values()):
            fixed.append(name)
    assert set(fixed) == set(table.KEPT)


def test_rows_hold_the_bars_that_their_cases_have_now(bench):
    """A row that was measured under an older bar is held against the present one."""
    cases, results = bench("cases").CASES + bench("attention_cases").CASES, bench("results")
    bars = {(case.op, tuple(case.shape.values())): case.bars for case in cases}
    for path in results.ROOT.glob("*.json"):
        for r in results.read(path):
            if r["pass"] in ("fwd", "fwd+bwd"):
                assert r["bar"] == bars[r["op"], tuple(r["shape"].values())].get(r["pass"]), r


def test_every_case_has_a_key_of_its_own_and_a_floor(bench):
    cases = bench("cases").CASES + bench("attention_cases").CASES
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        assert 0 < case.floor("fwd", 4e12, 7e14) < case.floor("fwd+bwd", 4e12, 7e14)


def test_the_table_of_serving_says_which_bars_are_met(bench):
    def made(what, B, T, **figures):
        common = {"op": "carve-125m", "pass": what, "shape": {"B": B, "T": T}, "commit": "a", "bar": None}
        return common | {"device": "d", "torch": "t", "triton": "t", "dtype": "bfloat16"} | figures

    step = made("step", 64, 512, ms=1, tokens_per_second=1000, share=0.3) | {"bar": 1000}
    long = [made("step", B, 16384, ms=1, tokens_per_second=10, share=share) for B, share in ((64, 0.7), (65, 0.69))]
    http = [made("http", 64, 512, tokens_per_second=n) for n in (900, 899)]
    alone = [made("generate", 1, 512, tokens_per_second=n) for n in (85, 84)]
    first = [made("first", 1, T, ms=ms, floor_ms=4) for T, ms in ((512, 8), (512, 8.1), (4096, 8.8), (4096, 8.9))]
    text = "\n".join(bench("table").serving([step, *long, *http, *alone, *first]))
    for bar in ("70 %", "90 %", "85", "8 ms", "2.2 ×"):
        assert text.count(f"| {bar} met |") == text.count(f"| {bar} NOT met |") == 1, text
    assert "| 1,000 met |" in text
