import errno
import os
from pathlib import Path

import pytest

from multimodal_gen.files import Staging, atomic_write, sweep, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "old"


def test_a_file_is_there_at_every_moment_of_its_replacement(tmp_path, monkeypatch) -> None:
    path = tmp_path / "new" / "a.json"
    write_text(path, "old")
    replace = os.replace

    def seen(source: Path, target: Path) -> None:
        assert path.read_text() == "old"
        replace(source, target)
        assert path.read_text() == "\xe9"

    monkeypatch.setattr("os.replace", seen)
    write_text(path, "\xe9")
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"\xc3\xa9"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_a_folder_is_written_as_a_whole(tmp_path, there) -> None:
    folder = tmp_path / "model"
    if there:
        folder.mkdir()
    with pytest.raises(ValueError, match="half"), atomic_write(folder) as partial:  # noqa: PT012
        partial.mkdir()
        (partial / "a").write_text("half")
        raise ValueError("half")
    assert sorted(tmp_path.rglob("*")) == [folder] * there
    with atomic_write(folder) as partial:
        partial.mkdir()
        (partial / "a").write_text("whole")
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "a"]


def test_staged_files_appear_together_when_the_block_ends(tmp_path) -> None:
    finals = [tmp_path / "deep" / "a.png", tmp_path / "deep" / "a.json"]
    with Staging() as staging:
        for final in finals:
            temporary = staging.path(final)
            assert temporary.suffix == final.suffix
            temporary.write_text(final.name)
        assert not any(final.exists() for final in finals)
    assert sorted((tmp_path / "deep").iterdir()) == sorted(finals)
    assert [final.read_text() for final in finals] == ["a.png", "a.json"]


def test_a_folder_is_never_replaced(tmp_path) -> None:
    (tmp_path / "a.png").mkdir()
    (tmp_path / "a.png" / "kept").write_text("old")
    (tmp_path / "first.png").write_text("old")
    with pytest.raises(IsADirectoryError, match=r"a\.png"), Staging(overwrite=True) as staging:  # noqa: PT012
        for name in ("first.png", "a.png"):
            staging.path(tmp_path / name).write_text("new")
    assert {each.name for each in tmp_path.iterdir()} == {"a.png", "first.png"}
    assert (tmp_path / "a.png" / "kept").read_text() == "old"
    assert (tmp_path / "first.png").read_text() == "old"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_error_no_staged_file_is_left_and_old_ones_are_kept(tmp_path, error) -> None:
    old = tmp_path / "a.png"
    old.write_text("old")
    with pytest.raises(error), Staging() as staging:  # noqa: PT012
        staging.path(old).write_text("new")
        staging.path(tmp_path / "b.json")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert old.read_text() == "old"


def test_a_file_that_appears_before_the_rename_is_kept(tmp_path) -> None:
    final = tmp_path / "a.png"
    with pytest.raises(FileExistsError, match=r"a\.png"), Staging() as staging:  # noqa: PT012
        staging.path(final).write_text("ours")
        staging.path(tmp_path / "a.json").write_text("record")
        final.write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert final.read_text() == "theirs"


@pytest.fixture
def without_links(monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("without_links")
def test_a_file_system_without_links_keeps_what_appears_too(tmp_path) -> None:
    with Staging() as staging:
        staging.path(tmp_path / "a.png").write_text("first")
    with pytest.raises(FileExistsError, match=r"a\.png"), Staging() as staging:
        staging.path(tmp_path / "a.png").write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "first"


@pytest.mark.usefixtures("without_links")
def test_a_name_taken_for_a_rename_that_fails_is_given_back(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="partial"), Staging() as staging:
        staging.path(tmp_path / "never-written.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rename_that_fails_undoes_those_before_it(tmp_path, overwrite: bool) -> None:
    with pytest.raises(OSError, match="partial"), Staging(overwrite=overwrite) as staging:  # noqa: PT012
        staging.path(tmp_path / "a.png").write_text("new")
        staging.path(tmp_path / "a.json")  # never written, so that there is nothing to rename
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_fails_restores_what_was_overwritten(tmp_path) -> None:
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(OSError, match="partial"), Staging(overwrite=True) as staging:  # noqa: PT012
        staging.path(tmp_path / "a.png").write_text("new")
        staging.path(tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "old"


def test_overwriting_leaves_only_the_new_file(tmp_path) -> None:
    (tmp_path / "a.png").write_text("old")
    with Staging(overwrite=True) as staging:
        staging.path(tmp_path / "a.png").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "new"


def test_what_a_killed_process_was_writing_is_swept_and_nothing_else(tmp_path) -> None:
    (tmp_path / "a.png").write_text("old")
    killed, other = Staging(overwrite=True, mark="run-"), Staging()
    killed.path(tmp_path / "a.png").write_text("half of it")
    killed._temporary(tmp_path / "a.png", "replaced").write_text("what stood there")
    other.path(tmp_path / "b.png").write_text("another program's")
    sweep(tmp_path, "run-")
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [
        *("another program's", "old", "what stood there")
    ]
    sweep(tmp_path / "nowhere", "run-")


def _stage(path: Path, text: str) -> None:
    with Staging(overwrite=True) as staging:
        staging.path(path).write_text(text)


@pytest.mark.parametrize("write", [write_text, _stage], ids=["alone", "staged"])
def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path, write) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file has that name"):
        write(pipe, "new")
    assert pipe.is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]
