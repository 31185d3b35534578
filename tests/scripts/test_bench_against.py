"""Benchmarks on two checkouts by turns: what runs, what is written, and what counts as slower."""

import csv
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = """
import argparse
import csv
from pathlib import Path

import subject

parser = argparse.ArgumentParser()
parser.add_argument("--commit")
parser.add_argument("--out", type=Path)
parser.add_argument("--only")
options = parser.parse_args()
table = options.out / "fake.csv"
new = not table.exists()
with table.open("a", newline="") as file:
    writer = csv.writer(file)
    if new:
        writer.writerow("commit benchmark case contender median_ms p20_ms p80_ms".split())
    for name, ms in subject.TIMES.items():
        writer.writerow([options.commit, "fake", options.only, name, ms, ms - 0.1, ms + 0.1])
raise SystemExit(subject.STATUS)
"""


@pytest.fixture
def against(bench) -> ModuleType:
    return bench("_against")


RUN = """
import runpy
import sys

assert sys.argv.pop(1) == "fake"
runpy.run_path(__file__.replace("run.py", "fake.py"), run_name="__main__")
"""


def checkout(
    folder: Path, times: dict[str, float], status: int = 0, *, runner: bool = False
) -> Path:
    """Make a checkout whose script, or `run.py`, writes what its package says."""
    (folder / "scripts" / "bench").mkdir(parents=True)
    (folder / "scripts" / "bench" / "fake.py").write_text(SCRIPT)
    if runner:
        (folder / "scripts" / "bench" / "run.py").write_text(RUN)
    (folder / "subject.py").write_text(f"TIMES, STATUS = {times}, {status}")
    return folder


@pytest.fixture
def run(against, tmp_path, monkeypatch):
    """Compare two checkouts by the command line of one; returns the status and the rows."""

    def compare(old: Path, new: Path) -> tuple[int, list[dict[str, str]]]:
        monkeypatch.setattr(against, "ROOT", new)
        words = ["--commit", "new", "--only", "wan", "--out", str(tmp_path), "--against", str(old)]
        parser = against.add_turns(against.argparse.ArgumentParser())
        parser.add_argument("--out", type=Path)
        parser.add_argument("--commit")
        options, _ = parser.parse_known_args(words)
        status = against.run_by_turns("fake", words, options)
        with (tmp_path / "fake.csv").open() as file:
            return status, list(csv.DictReader(file))

    return compare


def test_checkouts_take_turns_and_each_runs_its_own_package(run, tmp_path, capfd):
    old = checkout(tmp_path / "1234567", {"as ever": 2.0, "gone": 1.0})
    new = checkout(tmp_path / "work", {"as ever": 2.02, "faster": 1.0}, runner=True)
    status, rows = run(old, new)
    assert status == 0
    assert [row["commit"] for row in rows[::2]] == ["1234567", "new", "new", "1234567"]
    assert {row["case"] for row in rows} == {"wan"}, "other options go to both"
    said = capfd.readouterr().out
    assert "1.010: 1.010 1.010" in said
    assert "SLOWER" not in said
    assert said.count("in one checkout only") == 2


def test_what_is_slower_in_every_turn_is_named_and_fails(run, tmp_path, capfd):
    old = checkout(tmp_path / "1234567", {"layer": 2.0, "other": 2.0})
    new = checkout(tmp_path / "work", {"layer": 2.5, "other": 1.5})
    status, _ = run(old, new)
    assert status == 1
    (line,) = (x for x in capfd.readouterr().out.splitlines() if "SLOWER" in x)
    assert "fake, wan, layer" in line
    assert "1.250: 1.250 1.250  SLOWER in 2 of 2" in line


@pytest.mark.parametrize(
    ("median", "p20", "slower"), [(1.05, 1.04, True), (1.05, 1.02, False), (1.015, 1.03, False)]
)
def test_a_row_is_slower_where_its_rounds_lie_above_by_more_than_2_percent(
    against, median, p20, slower
):
    before = {"median_ms": "1.0", "p20_ms": "0.97", "p80_ms": "1.025"}
    after = {"median_ms": str(median), "p20_ms": str(p20), "p80_ms": "1.1"}
    assert against.is_slower(before, after) is slower


def test_a_run_that_fails_ends_the_comparison(run, tmp_path, capfd):
    old = checkout(tmp_path / "1234567", {"layer": 2.0}, status=1)
    status, rows = run(old, checkout(tmp_path / "work", {"layer": 2.0}))
    assert (status, len(rows)) == (1, 1)
    assert "FAILED: 1234567" in capfd.readouterr().out


def test_what_is_no_checkout_is_refused(run, tmp_path):
    with pytest.raises(SystemExit, match=r"must be a checkout with scripts/bench/fake\.py, got"):
        run(tmp_path / "empty", checkout(tmp_path / "work", {}))


@pytest.mark.parametrize("name", ["by_triton", "backward", "layer_overhead", "wan_forward"])
def test_benchmarks_take_another_checkout(run_bench, name, tmp_path):
    result = run_bench(name, "--against", tmp_path)
    assert str(result.code).startswith(f"--against must be a checkout with scripts/bench/{name}.py")
