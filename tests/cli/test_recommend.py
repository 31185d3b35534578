"""`sglang attention recommend` on reports of comparisons that were made before."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from multimodal_gen.cli.main import main
from multimodal_gen.records import write_record
from multimodal_gen.runtime.comparison.record import Report, read_record
from tests.helpers.flags import changed
from tests.helpers.reports import make_report


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
    assert main(["attention", "recommend", "--comparison", str(folder), "--seeds", "0"]) == 2
    assert "--model-path must be given with --seeds" in capsys.readouterr().err


def test_a_folder_without_a_report_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attention", "recommend", "--comparison", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: --comparison must be the folder of a comparison, with its report.json, got "
        f"{str(tmp_path)!r} without one; `sglang attention compare` makes one, and so does "
        f"--model-path\n"
    )


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--min-vmaf", "101", "at most 100, got 101"),
        ("--min-vmaf", "-1", "a number >= 0, got -1"),
        ("--max-error", "-0.5", "a number >= 0, got -0.5"),
    ],
)
def test_limits_that_no_run_can_meet_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, rule: str
) -> None:
    assert main(["attention", "recommend", "--comparison", str(folder), option, value]) == 2
    assert f"error: {option} must be {rule}; see" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention.txt", "attention.json", "attention"])
def test_a_config_has_a_name_that_generate_reads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    read = ["attention", "recommend", "--comparison", str(folder), "--min-psnr", "20"]
    assert main([*read, "--output", str(tmp_path / name)]) == 2
    assert "error: --output must end in .yaml or .yml, as what reads" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("searched", [False, True])
def test_a_config_that_cannot_be_written_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], searched: bool
) -> None:
    held = sorted(folder.iterdir())
    arguments = ["--comparison", str(folder), "--min-psnr", "20"]
    arguments += ["--model-path", "nowhere", "--prompt", "a fox"] if searched else []
    assert main(["attention", "recommend", *arguments, "--output", str(folder)]) == 2
    assert f"--output must be a file, got {str(folder)!r}, which is a" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == held
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "a.yaml"
    assert main(["attention", "recommend", *arguments, "--output", str(below)]) == 2
    assert "--output must lie in a folder" in capsys.readouterr().err
    assert main(["attention", "recommend", *arguments, "--output", "/proc/x/a.yaml"]) == 2
    assert "error: --output must be writable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comparison", "name"),
    [
        ("", "report.json"),
        ("report.json", "report.json"),
        ("report.json", "report.html"),
        ("", "records/a.json"),
        ("", "clips/below/a.yaml"),
        ("copy.json", "copy.json"),
        ("", "link.yaml"),
    ],
)
def test_a_config_takes_the_place_of_no_file_of_a_comparison(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], comparison: str, name: str
) -> None:
    held = tmp_path / "held"
    shutil.copytree(folder, held)
    shutil.copy(held / "report.json", held / "copy.json")
    (held / "link.yaml").symlink_to(held / "report.json")
    report = (held / "report.json").read_text()
    read = ["attention", "recommend", "--comparison", str(held / comparison), "--min-psnr", "20"]
    assert main([*read, "--output", str(held / name)]) == 2
    assert capsys.readouterr().err == (
        f"error: --output must not be a file of the comparison, got {str(held / name)!r}; give "
        f"another name, such as attention.yaml\n"
    )
    assert (held / "report.json").read_text() == (held / "copy.json").read_text() == report
    assert main([*read, "--output", str(held / "attention.yaml")]) == 0


def test_a_search_is_given_no_config_of_the_name_of_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "report.json"
    assert main(search(tmp_path / "new", "--output", str(output))) == 2
    assert "--output must not be a file of the comparison, got" in capsys.readouterr().err


def search(folder: Path, *flags: str) -> list[str]:
    """Return the command line of a search, which finds no model."""
    prompt = "A red fox runs through fresh snow at sunrise"
    given = ["--model-path", "A made-up model", "--prompt", prompt, "--comparison", str(folder)]
    size = ["--height", "480", "--width", "832", "--steps", "2", "--seeds", "0-1"]
    return ["attention", "recommend", *changed([*given, *size], flags)]


def test_a_search_replaces_no_other_comparison(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = (folder / "report.json").read_bytes()
    other = ["--height", "64", "--seeds", "7", "--dtype", "float32"]
    assert main(search(folder, "--backends", "sage_attn", *other)) == 2
    said = capsys.readouterr().err
    assert f"or this search's own, got {str(folder)!r}, which holds another" in said
    assert (
        "with other dtype, settings, seeds, backends, replayed layers; name another folder" in said
    )
    assert (folder / "report.json").read_bytes() == held
    (tmp_path / "thesis.txt").touch()
    assert main(search(tmp_path)) == 2
    assert "which has files in it that are no comparison" in capsys.readouterr().err
    assert main(search(tmp_path / "thesis.txt")) == 2
    assert "which is a file" in capsys.readouterr().err


def test_a_search_goes_on_with_its_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = read_record(Report, folder / "report.json")
    runs = [replace(run, layers=()) for run in report.candidates[:2]]
    bare = replace(report.reference, layers=()), (replace(report.floor[0], layers=()),)
    report = replace(report, reference=bare[0], floor=bare[1], candidates=tuple(runs))
    write_record(report, tmp_path / "own" / "report.json")
    asked = "sage_attn;sliding_tile_attn:window=[3,3,3];video_sparse_attn:sparsity=0.5"
    (tmp_path / "interrupted" / "records").mkdir(parents=True)
    for name in ("own", "interrupted", "new"):
        assert main(search(tmp_path / name, "--backends", asked)) == 2
        assert "'A made-up model'" in capsys.readouterr().err  # nothing else was wrong


@pytest.mark.slow
def test_a_search_ends_with_a_config_that_generate_takes(
    tiny_pipeline: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, model = tmp_path / "attention.yaml", str(tiny_pipeline("wan"))
    size = ["--height", "64", "--width", "96", "--num-frames", "9", "--num-inference-steps", "2"]
    common = ["--model-path", model, "--prompt", "a fox", "--device", "cpu", *size]
    backends = "video_sparse_attn:sparsity=0.75;video_sparse_attn:sparsity=0.5"
    search = ["--backends", backends, "--comparison", str(tmp_path / "searched")]
    search += ["--min-psnr", "10", "--output", str(config)]
    assert main(["attention", "recommend", *common, *search]) == 0
    assert f"attention config: {config}" in capsys.readouterr().out
    assert (tmp_path / "searched" / "report.html").exists()
    output = ["--output-path", str(tmp_path / "fox.mp4"), "--attention-config", str(config)]
    assert main(["generate", *common, *output]) == 0
    record = json.loads((tmp_path / "fox.json").read_text())
    assert yaml.safe_load(config.read_text())["backend"] in json.dumps(record["attention"])
