"""The script that prints how much code there is."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

MODULE = '''"""What it does."""

import os
from pathlib import (
    Path,
)

# A comment.
LIMIT, _HIDDEN = 3, 4
"""What the limit is."""
size: int = 0


class Box:
    """A box.

    Not code either.
    """

    import json

    def open(self) -> str:  # this is code
        """Open it."""
        # A comment.
        return """two
lines"""


async def close() -> None:
    "Close it."
    Path(os.name)
'''


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("code_size")


def test_prose_layout_and_imports_are_no_code(script) -> None:
    code = [
        "LIMIT, _HIDDEN = 3, 4",
        "size: int = 0",
        "class Box:",
        "    def open(self) -> str:  # this is code",
        '        return """two',
        'lines"""',
        "async def close() -> None:",
        "    Path(os.name)",
    ]
    assert script.code_lines(MODULE) == len(code)
    assert script.code_lines("") == 0


def test_public_names_are_those_at_the_top_without_an_underscore(script) -> None:
    assert script.public_names(MODULE) == ["LIMIT", "size", "Box", "close"]


def test_files_for_something_are_told_by_words_of_their_paths(
    script, monkeypatch, tmp_path
) -> None:
    for name in ("ring.py", "ring_tail.py", "string.py", "sta/__init__.py", "sta/ring.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('"""Only prose."""' if name.endswith("__init__.py") else "x = 1\n")
    (tmp_path / "sta" / "windows.json").write_text("{}")
    (tmp_path / "static.py").write_text("x = 1\n")
    assert script.files_for("ring", tmp_path) == ["ring.py", "ring_tail.py", "sta/ring.py"]
    monkeypatch.setitem(script.MORE_FILES, "sta", {"static.py": "a reason"})
    assert script.files_for("sta", tmp_path) == ["sta/ring.py", "sta/windows.json", "static.py"]


def test_every_file_that_is_named_is_there(script) -> None:
    named = [name for files in script.MORE_FILES.values() for name in files]
    assert all((SCRIPTS.parent / script.PACKAGE / name).is_file() for name in named)


def test_no_figure_is_above_its_ceiling(script, capsys) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for text in ("attention and kernels", "files for the ring", "files for STA", "public names"):
        assert text in out
    for heading in ("files for ring:", "package by folder:", "longest modules, all lines:"):
        assert heading in out.splitlines()


def test_a_figure_above_its_ceiling_is_reported(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(script, "figures", lambda root: {"kernels": 5, "tests": 7})
    monkeypatch.setattr(script, "CEILINGS", {"kernels": 5})
    assert script.main(["--check"]) == 0
    monkeypatch.setattr(script, "CEILINGS", {"kernels": 4})
    assert script.main([]) == 0
    assert script.main(["--check"]) == 1
    assert capsys.readouterr().err.endswith("kernels must be at most 4, got 5\n")
