"""What the pages about comparisons say is what the code does."""

import dataclasses
import re
from pathlib import Path

import pytest

from multimodal_gen.runtime.comparison import page, record, verdict

PACKAGE = Path(record.__file__).parent
PAGES = Path(__file__).parents[3] / "docs" / "pages"
TEXT = (PAGES / "reference" / "comparison.md").read_text("utf-8")
RECORDS = [
    each
    for each in vars(record).values()
    if dataclasses.is_dataclass(each) and each.__module__ == record.__name__
]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_is_listed(kind: type) -> None:
    (row,) = re.findall(rf"^\| `{kind.__name__}` \| (.*) \|$", TEXT, re.MULTILINE)
    assert row.replace("`", "").split(", ") == [each.name for each in dataclasses.fields(kind)]


def test_the_numbers_of_rules_are_those_of_the_code() -> None:
    assert f"`version` is {record.VERSION};" in TEXT
    assert f"`schema` is `{record.SCHEMA}`" in TEXT
    assert f"at most {page.LIMIT // 10**6} MB" in TEXT
    for side, _ in page.SIZES:
        assert re.search(rf"\b{side}\b", TEXT)
    assert (verdict.FACTOR, verdict.STILL, verdict.MOVES) == (2.0, 0.01, 0.5)
    rows = dict(
        re.findall(r"^\| ([A-Za-z, -]+) \| [^|]* \| ([\d.]+)(?: dB)? \|$", TEXT, re.MULTILINE)
    )
    for measure in verdict.MEASURES:
        (written,) = [
            number for names, number in rows.items() if measure.label in names.split(", ")
        ]
        distance = 10 ** (-float(written) / 10) if measure.unit == "dB" else float(written)
        assert measure.rounding == pytest.approx(distance)


def test_every_module_is_listed() -> None:
    files = {
        path.name for path in PACKAGE.iterdir() if path.suffix in (".py", ".html", ".css", ".js")
    }
    readme = (PACKAGE / "README.md").read_text("utf-8")
    (table,) = re.findall(r"\| module \| [^\n]*\n((?:\|.*\n)+)", readme)
    names = {
        name for row in table.splitlines() for name in re.findall("`(.*?)`", row.split("|")[1])
    }
    assert names == files - {"__init__.py"}


def test_the_picture_is_small() -> None:
    assert (PAGES / "guides" / "report.png").stat().st_size < 300_000
