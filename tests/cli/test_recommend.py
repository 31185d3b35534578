"""`sglang attention recommend` on reports of comparisons that were made before."""

import json
from pathlib import Path

import pytest
import yaml

from multimodal_gen.cli.main import main
from multimodal_gen.runtime.comparison.record import write_record
from multimodal_gen.testing.reports import make_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    report = make_report(folder, size=(3, 8, 8), layers=1, steps=2, heads=1)
    write_record(report, folder / "report.json")
    return folder


def test_a_config_is_written_with_its_reasons(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "attention.yaml"
    arguments = ["--comparison", str(folder), "--min-psnr", "20", "--output", str(file)]
    assert main(["attention", "recommend", *arguments]) == 0
    out = capsys.readouterr().out
    assert "sliding_tile_attn:window=[3,3,3] is the fastest that is good enough" in out
    assert "video_sparse_attn is faster: PSNR is " in out
    assert f"attention config: {file}" in out
    assert yaml.safe_load(file.read_text()) == {
        "backend": "sliding_tile_attn",
        "config": {"window": [3, 3, 3]},
    }


def test_nothing_is_written_where_nothing_is_good_enough(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "attention.yaml"
    arguments = ["--comparison", str(folder / "report.json"), "--min-psnr", "90", "--json"]
    assert main(["attention", "recommend", *arguments, "--output", str(file)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["recommended"], found["nearest"]) == (None, "fa")
    assert not file.exists()


def test_what_only_a_search_takes_is_refused_without_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--comparison", str(folder), "--prompt", "a fox", "--height", "64", "--steps", "3"]
    assert main(["attention", "recommend", *arguments]) == 2
    assert (
        "--model-path must be given with --prompt, --height, --num-inference-steps"
        in capsys.readouterr().err
    )


def test_a_folder_without_a_report_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attention", "recommend", "--comparison", str(tmp_path)]) == 2
    assert "must be a readable JSON file" in capsys.readouterr().err
