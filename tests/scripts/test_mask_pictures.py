"""The pictures of what sparse methods keep."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from multimodal_gen.runtime.platforms import AttentionBackendEnum

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    path = REPOSITORY / "scripts" / "mask_pictures.py"
    spec = importlib.util.spec_from_file_location("mask_pictures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_sparse_method_has_a_picture_on_its_page(script: ModuleType) -> None:
    drawn = {picture.method for _, picture in script.pictures()}
    sparse = {str(name) for name in AttentionBackendEnum if name.is_sparse}
    assert drawn == sparse - {"skip_softmax"}  # its mask has all pairs
    for name, picture in script.pictures():
        page = script.PICTURES.parent / f"{picture.method}.md"
        assert f"(masks/{name}.svg)" in page.read_text()
        assert (script.PICTURES / f"{name}.svg").exists()


def test_a_window_is_drawn_as_it_was(script: ModuleType) -> None:
    assert script.main(["--check", "sliding_tile_attn"]) == 0


@pytest.mark.slow
def test_the_pictures_are_what_the_methods_do(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0


def test_a_picture_shows_each_kept_pair(script: ModuleType) -> None:
    kept = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    lines = list(script.matrix(kept))
    patterns = dict(re.findall(r'<path id="(\w+)" d="([^"]*)"/>', "".join(lines)))
    rows: list[list[bool]] = []
    for name, tall in re.findall(
        r'<use href="#(\w+)" [^>]*?(?:scale\(1 (\d)\))?"/>', "".join(lines)
    ):
        row, at = [False] * 4, 0
        for skip, width in re.findall(r"m(\d+) 0h(\d+)", patterns[name]):
            at += int(skip)
            row[at : at + int(width)] = [True] * int(width)
            at += int(width)
        rows += [row] * int(tall or 1)
    assert torch.equal(torch.tensor(rows), kept)


def test_a_stale_picture_is_named(script, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(script, "PICTURES", tmp_path)
    assert script.main(["--check", "sliding_tile_attn"]) == 1
    assert "sliding_tile_attn.svg: run scripts/mask_pictures.py" in capsys.readouterr().err
