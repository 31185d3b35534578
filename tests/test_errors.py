"""What is said of the errors of others."""

import pytest

from multimodal_gen.errors import first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("it failed", "it failed"),
        ("\n  it failed.\nat line 3\n", "it failed"),
        ("Missing keys:\n  a.weight\n  b.weight", "Missing keys: a.weight"),
        ("Missing keys:", "Missing keys:"),
        ("", "RuntimeError"),
        (" \n ", "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line
