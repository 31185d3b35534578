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


def test_a_table_that_does_not_fit_becomes_a_list_that_cuts_nothing_off() -> None:
    rows = [
        Row(("transformer_2", "self", "sparse_video_gen_2_attn"), ["because " * 8]),
        Row(("vae", "cross", "fa"), []),
    ]
    assert list(table(("component", "role", "backend"), rows)) == [
        "component: transformer_2; role: self;",
        "  backend: sparse_video_gen_2_attn",
        "    because because because because",
        "      because because because because",
        "component: vae; role: cross; backend: fa",
    ]


def test_text_is_wrapped_to_the_terminal_and_words_stay_whole() -> None:
    command = "pip-install-" + "x" * 90
    lines = wrapped(f"{'word ' * 20}{command}", indent="    ")
    assert lines[0] == "    " + " ".join(["word"] * 7)
    assert lines[-1].strip() == command


def test_a_terminal_of_no_width_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert wrapped("a few words in a terminal", indent="    ")
