import pytest

from multimodal_gen.cli.table import Row, table, wrapped


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [Row(("fa", "yes")), Row(("torch_sdpa", "no"), ["why [not]"])]
    assert list(table(("backend", "ok"), rows)) == [
        "backend     ok",
        "----------  ---",
        "fa          yes",
        "torch_sdpa  no",
        "    why [not]",
    ]


def test_text_is_wrapped_at_80_columns_at_least_and_words_stay_whole() -> None:
    command = "pip-install-" + "x" * 90
    lines = wrapped(f"{'word ' * 20}{command}", indent="    ")
    assert lines[0] == "    " + " ".join(["word"] * 15)
    assert lines[-1].strip() == command
