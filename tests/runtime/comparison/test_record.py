import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from multimodal_gen.errors import ConfigError
from multimodal_gen.records import write_record
from multimodal_gen.runtime.comparison import record
from multimodal_gen.runtime.comparison.record import (
    Cost,
    Environment,
    FrameMetrics,
    Generation,
    LayerErrors,
    MaskPicture,
    Model,
    Report,
    Run,
    Verdict,
    read_record,
)
from multimodal_gen.settings import as_plain


def _run(name: str, **changes: Any) -> Run:
    filled = Run(name=name, configuration=name, backend=name, parameters={"window": [3, 3, 3]})
    return dataclasses.replace(filled, **changes)


def _report() -> Report:
    generation = Generation(
        prompt=0,
        seed=1,
        frames_path="clips/a.npy",
        step_seconds=(0.5, 0.25),
        latents=(0.0, math.inf),
        frames=FrameMetrics(psnr=math.inf, ssim=1.0),
    )
    cost = Cost(
        step_seconds=0.25,
        generation_seconds=1.0,
        warm_up_seconds=0.25,
        peak_memory=None,
        density=0.5,
        attention_share=0.5,
    )
    layer = LayerErrors(
        component="transformer",
        name="blocks.0.attn1",
        layer=0,
        step=1,
        backend="sliding_tile_attn (triton)",
        relative_l1=(0.5, math.nan),
        relative_l2=(0.5, 0.25),
        cosine=(1.0, 0.5),
    )
    mask = MaskPicture(
        component="transformer",
        layer=0,
        head=1,
        step=1,
        grid=(1, 2, 2),
        cell=(1, 1, 2),
        query=(0, 1, 1),
        kept=(((0.5,), (0.0,)),),
        exact=(((0.25,), (0.25,)),),
    )
    candidate = _run(
        "sliding_tile_attn",
        generations=(generation,),
        cost=cost,
        layers=(layer,),
        masks=(mask,),
        verdict=Verdict(word="visible", reasons=("PSNR 30 dB, the noise has 60 dB",)),
    )
    return Report(
        created="2026-11-22T07:00:00Z",
        environment=Environment(device="cpu", versions={"cuda": None}, multimodal_gen="0.1.0"),
        model=Model(path="m", pipeline="P", kind="video", dtype="float32", identity="abc"),
        settings={"height": 32},
        prompts=("a fox",),
        seeds=(1,),
        reference=_run("torch_sdpa"),
        candidates=(candidate, _run("sage_attn", status="out of memory", message="2 GiB wanted")),
    )


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    report = _report()
    path = tmp_path / "report.json"
    write_record(report, path)
    found = read_record(Report, path)
    assert as_plain(found) == as_plain(report)  # NaN differs from itself
    assert found.candidates[0].generations == report.candidates[0].generations
    assert math.isnan(found.candidates[0].layers[0].relative_l1[1])
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert "NaN" not in path.read_text()
    assert [run.name for run in found.runs] == ["torch_sdpa", "sliding_tile_attn", "sage_attn"]


COST = {"step_seconds": 1.0, "generation_seconds": 2.0, "warm_up_seconds": 0.5, "density": 1.0}
COST |= {"peak_memory": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "must be the report of a comparison"),
        ({"version": 0}, "must have version 3, got 0"),
        ({"seeds": [1, "2"]}, r"\.seeds\[1\] must be an integer, got '2'"),
        ({"seeds": 1}, r"\.seeds must be a list, got 1"),
        ({"model": {"path": "m"}}, r"\.model must have dtype, identity, kind, pipeline"),
        ({"more": 1}, r"must have no fields but .*, got \['more'\]"),
        ({"created": True}, r"\.created must be text, got True"),
        ({"settings": []}, r"\.settings must be an object"),
        ({"environment": None}, "must be an object with the fields "),
        ({"candidates": [{**as_plain(_run("a")), "status": "so so"}]}, "must be one of 'done'"),
        (
            {"reference": {**as_plain(_run("a")), "cost": {**COST, "attention_share": 16.65}}},
            r"cost\.attention_share must be a number in \[0, 2\], got 16.65",
        ),
        (
            {"candidates": [{**as_plain(_run("a")), "layers": [1]}]},
            r"layers\[0\] must be an object",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**as_plain(_report()), **change}))
    with pytest.raises(ConfigError, match=message):
        read_record(Report, path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cost", "density"), -3, r"\.density must be a number in \[0, 1.001\], got -3"),
        (("cost", "density"), 10**400, r"\.density must be a number in"),
        (("cost", "density"), [0.5], r"\.density must be a number in .*, got \[0.5\]"),
        (("cost", "generation_seconds"), 1e300, r"\.generation_seconds must be a number in"),
        (("generations", 0, "frames", "vmaf"), 900, r"\.vmaf must be a number in \[0, 100\]"),
        (("generations", 0, "frames", "psnr"), -1e5, r"\.psnr must be a number in"),
        (("layers", 0, "cosine"), [7.0, 0.5], r"\.cosine\[0\] must be a number in"),
        (("layers", 0, "cosine"), [0.5], "must have an entry per head each, got 1 and 2"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    edited = as_plain(_report())
    place = edited["candidates"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "report.json"
    file.write_text(json.dumps(edited))
    with pytest.raises(ConfigError, match=message):
        read_record(Report, file)


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_half_written_or_missing_file_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"report '.*report\.json' must be"):
        read_record(Report, path)


def test_a_pipe_in_place_of_a_record_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.json")
    with pytest.raises(ConfigError, match=r"readable JSON file: this is no regular file"):
        read_record(Report, tmp_path / "report.json")


def test_nothing_half_written_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(record.Path, "write_text", broken)
    with pytest.raises(OSError, match="full"):
        write_record(_report(), path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
