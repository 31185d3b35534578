import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.comparison.cost import Meter, Spent, cost_of
from multimodal_gen.runtime.comparison.record import Generation
from multimodal_gen.runtime.comparison.store import (
    Store,
    StoredGeneration,
    StoredMetrics,
    clip_writers,
    weights_digest,
)
from multimodal_gen.settings import as_plain


def spent(**changes: Any) -> Spent:
    values: dict[str, Any] = {
        "seconds": 3.0,
        "step_seconds": (1.0, 2.0),
        "attention_seconds": 1.5,
        "peak_memory": None,
        "density": 0.5,
    }
    return Spent(**{**values, **changes})


def test_attention_takes_no_longer_than_its_generation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a part of the 3 seconds that the .*, got 60"):
        spent(attention_seconds=60.0)
    store = Store(tmp_path / "comparison", {}, resume=False)
    key = written(store, np.zeros((1, 8, 8, 3), np.uint8))
    assert store.find(StoredGeneration, key) is not None
    record = tmp_path / "comparison" / "records" / f"{key}.json"
    edited = record.read_text().replace('"attention_seconds": 1.5', '"attention_seconds": 60.0')
    assert edited != record.read_text()
    record.write_text(edited)
    assert store.find(StoredGeneration, key) is None


def written(store: Store, pixels: Any) -> str:
    """Write a generation; return its key."""
    frames, preview, files = clip_writers("clip", pixels, 8)
    generation = Generation(prompt=0, seed=0, frames_path=frames, preview_path=preview)
    record = StoredGeneration(
        generation=generation, spent=spent(), attention=("a line",), warm_up_seconds=0.5
    )
    key = store.key(seed=0)
    store.write(key, record, files)
    return key


def test_what_is_written_is_found_by_all_that_it_depends_on(tmp_path: Path) -> None:
    store = Store(tmp_path / "out", {"model": "m"}, resume=False)
    key = written(store, np.random.default_rng(0).random((5, 40, 60, 3)))
    found = store.find(StoredGeneration, key)
    assert found is not None
    assert as_plain(found.spent) == as_plain(spent())
    again = Store(tmp_path / "out", {"model": "m"}, resume=True)
    assert again.find(StoredGeneration, again.key(seed=0)) == found
    assert again.find(StoredGeneration, again.key(seed=1)) is None
    other = Store(tmp_path / "out", {"model": "n"}, resume=True)
    assert other.find(StoredGeneration, other.key(seed=0)) is None
    assert again.find(StoredMetrics, again.key(seed=0)) is None  # of another kind
    assert again.read_array("clips/clip.npy").shape == (5, 40, 60, 3)


@pytest.mark.parametrize("missing", ["clips/clip.npy", "clips/clip.mp4", "records"])
def test_a_generation_without_one_of_its_files_is_not_found(tmp_path: Path, missing: str) -> None:
    store = Store(tmp_path, {}, resume=False)
    key = written(store, np.zeros((2, 40, 60, 3)))
    path = tmp_path / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    assert store.find(StoredGeneration, key) is None


@pytest.mark.parametrize("emptied", ["clip.npy", "clip.mp4"])
def test_a_generation_with_an_empty_file_is_not_found(tmp_path: Path, emptied: str) -> None:
    store = Store(tmp_path, {}, resume=False)
    key = written(store, np.zeros((2, 40, 60, 3)))
    (tmp_path / "clips" / emptied).write_bytes(b"")
    assert store.find(StoredGeneration, key) is None


def test_nothing_remains_of_a_write_that_fails(tmp_path: Path) -> None:
    store = Store(tmp_path, {}, resume=False)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.raises(UsageError, match=r"could not be written to .*: the disk is full"):
        store.write("key", Generation(prompt=0, seed=0), {"clips/a.npy": fail})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_write_that_stops_half_way_tells_of_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path, {}, resume=False)

    def fail(path: Path) -> None:
        raise OSError("problem writing element 8192 to file")  # NumPy's, whatever the cause

    with pytest.raises(UsageError, match=r"8192 to file; the disk has \d+ MiB of space left"):
        store.write("key", Generation(prompt=0, seed=0), {"clips/a.npy": fail})


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output must be a folder, got .*, which is a file"):
        Store(tmp_path / "file", {}, resume=True)


@pytest.mark.parametrize(
    ("shape", "small"),
    [((64, 96, 3), (64, 96)), ((1024, 1024, 3), (341, 341)), ((100, 961, 3), (33, 320))],
)
def test_images_keep_their_pixels_and_get_a_small_copy(
    tmp_path: Path, shape: tuple[int, ...], small: tuple[int, int]
) -> None:
    from PIL import Image

    frames, preview, files = clip_writers("a", np.full(shape, 0.5), 1)
    assert (frames, preview) == ("clips/a.npy", "clips/a.png")
    for path, write in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        write(tmp_path / path)
    kept = np.load(tmp_path / frames)
    assert kept.shape == (1, *shape)
    assert set(kept.flatten().tolist()) == {128}
    with Image.open(tmp_path / preview) as image:
        assert image.size == small[::-1]
        assert image.getpixel((0, 0)) == (128, 128, 128)


def test_weights_are_told_apart_by_their_values() -> None:
    def digest(change: float = 0.0) -> str:
        model = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(model.weight, 1.0)
        torch.nn.init.constant_(model.bias, change)
        return weights_digest(SimpleNamespace(components={"transformer": model, "tokenizer": None}))

    assert digest() == digest()
    assert digest() != digest(0.5)
    shifted = [
        weights_digest(SimpleNamespace(components={"scheduler": SimpleNamespace(config=config)}))
        for config in ({"shift": 3.0, "_path": "a"}, {"shift": 3.0}, {"shift": 9.0})
    ]
    assert shifted[0] == shifted[1] != shifted[2]
    on_meta = torch.nn.Linear(3, 3, device="meta")
    assert weights_digest(SimpleNamespace(components={"transformer": on_meta})) != digest()


def test_what_is_apart_is_not_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    meter = Meter(torch.device("cpu"))
    monkeypatch.setattr(meter.timings, "now", lambda: now[0])
    start = meter.timings.now()
    now[0] = 1.0  # the prompt
    meter.timings.start_steps()
    for seconds, beside in ((2.0, 0.0), (3.0, 4.0)):
        with meter.excluded():
            now[0] += beside
        now[0] += seconds
        meter.timings.step_done()
    now[0] += 0.5
    meter.timings.split(start)
    found = meter.spent(AttentionReport(layers=()))
    assert found.step_seconds == (2.0, 3.0)
    assert found.seconds == 6.5
    assert (found.peak_memory, found.density, meter.highest) == (None, 1.0, 0)


def test_costs_are_medians_over_generations() -> None:
    found = cost_of(
        [spent(), spent(seconds=9.0, peak_memory=7), spent(seconds=4.0, density=0.2)], 1.25
    )
    assert found is not None
    assert (found.step_seconds, found.generation_seconds) == (1.5, 4.0)
    assert (found.warm_up_seconds, found.peak_memory) == (1.25, 7)
    assert found.density == pytest.approx(0.4)
    assert found.attention_share == pytest.approx(0.5)
    assert cost_of([], 0.0) is None
