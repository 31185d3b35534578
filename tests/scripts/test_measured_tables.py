"""The tables of measurements in the documentation."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measured_tables.py"
ROWS = """gpu,torch,triton,commit,case,contender,median_ms,density
H200,2.11.0+cu130,3.6.0,abc,small,dense,8.0,1.0
H200,2.11.0+cu130,3.6.0,abc,small,sparse,2.0,0.1
H200,2.11.0+cu130,3.6.0,def,small,sparse,4.0,0.1
"""
PAGE = """# Page

<!-- measured
file: a.csv
where: {commit: abc, case: small}
titled: layer
rows:
  - {title: dense, contender: dense, without: [kept]}
  - {title: sparse, contender: sparse}
columns:
  - {title: time, cell: "{median_ms:.1f} ms, {over:.1f}x", over: {contender: dense}}
  - {title: kept, cell: "{percent:.0f} %"}
-->
<!-- measured: end -->
"""
TABLE = """
| layer | time | kept |
| --- | --- | --- |
| dense | 8.0 ms, 1.0x | |
| sparse | 2.0 ms, 4.0x | 10 % |

<small>H200, torch 2.11.0, triton 3.6.0. Rows: `a.csv` at abc.</small>

"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("measured_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "a.csv").write_text(ROWS)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs" / "pages").mkdir(parents=True)
    return module


def test_a_table_is_made_of_the_rows_it_names(script: ModuleType) -> None:
    filled = script.filled_in(PAGE)
    assert filled == PAGE.replace("-->\n<!-- measured: end", f"-->\n{TABLE}<!-- measured: end")
    assert script.filled_in(filled) == filled


def test_check_shows_what_is_stale_and_writing_repairs_it(script, tmp_path, capsys) -> None:
    assert script.main(["--check"]) == 1
    assert "+| sparse | 2.0 ms, 4.0x | 10 % |" in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text() == PAGE
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("written", "instead", "problem"),
    [
        ("contender: sparse}", "contender: absent}", "0 rows of a.csv"),
        ("where: {commit: abc, case", "where: {case", "2 rows of a.csv"),
        ("<!-- measured: end -->", "", "must have its"),
    ],
)
def test_a_table_of_no_row_or_of_several_is_an_error(
    script, tmp_path, capsys, written, instead, problem
) -> None:
    assert written in PAGE
    (tmp_path / "README.md").write_text(PAGE.replace(written, instead))
    assert script.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: README.md: ")
    assert problem in error


def test_of_several_rows_one_may_be_picked(script: ModuleType) -> None:
    page = PAGE.replace("{commit: abc, case: small}", "{case: small, contender: sparse}")
    page = page.replace("contender: dense, without: [kept]", "pick: 0")
    page = page.replace("title: sparse, contender: sparse", "title: sparse, pick: -1")
    page = page.replace(", {over:.1f}x", "")
    assert "| dense | 2.0 ms |" in script.filled_in(page)
    assert "| sparse | 4.0 ms |" in script.filled_in(page)


def test_a_block_of_the_study_is_made_of_its_rows(script: ModuleType, monkeypatch) -> None:
    def lines_of(block: str, rows_of) -> list[str]:
        return [f"{block} of {len(rows_of('a.csv'))} rows"]

    monkeypatch.setattr(script.study_page, "lines_of", lines_of)
    page = "<!-- measured\nstudy: ends\n-->\n<!-- measured: end -->\n"
    filled = "<!-- measured\nstudy: ends\n-->\n\nends of 3 rows\n\n<!-- measured: end -->\n"
    assert script.filled_in(page) == filled
