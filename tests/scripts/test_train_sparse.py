"""A small fine-tuning run: what it learns from, what it writes, and what it refuses."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

import multimodal_gen  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = ("--frames", "9", "--height", "128", "--width", "128", "--dtype", "float32")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # diffusers' own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def run(monkeypatch, tiny_pipeline, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sys.modules.pop("train_sparse", None)
    script = importlib.import_module("train_sparse")
    yield lambda *words: script.main(
        [str(tiny_pipeline("wan")), str(tmp_path / "out"), *SMALL, *words]
    )
    sys.modules.pop("train_sparse", None)


def table(folder):
    with (folder / "loss.csv").open() as file:
        return list(csv.DictReader(file))


def losses(rows):
    return [float(row["loss"]) for row in rows if row["loss"]]


def keys_of(folder):
    (file,) = (folder / "transformer").glob("*.safetensors")
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        return set(stored.keys())


def test_the_loss_falls_a_run_goes_on_and_the_folder_is_enough(run, tmp_path) -> None:
    words = ("--config", "sparsity=0.9", "--weights", "all", "--lr", "0.002", "--every", "10")
    assert run(*words, "--steps", "20") == 0
    assert run(*words, "--steps", "30") == 2  # would begin anew where a run is
    with (tmp_path / "out" / "loss.csv").open("a") as file:
        file.write("20,0.5,\n21,0.5,\n")  # as of a run that was broken off behind its last state
    (tmp_path / "out" / "state").rename(tmp_path / "out" / "state.new")  # and while it was saved
    assert run(*words, "--steps", "30", "--resume") == 0
    rows = table(tmp_path / "out")
    assert [int(row["step"]) for row in rows] == [*range(31)]
    found = losses(rows)
    assert sum(found[-8:]) < 0.9 * sum(found[:8])
    pipe = diffusers.WanPipeline.from_pretrained(tmp_path / "out")
    with multimodal_gen.apply(pipe, attention_backend="video_sparse_attn") as handle:
        assert any("by the gates of the checkpoint" in note for note in handle.report().notes)


def test_what_dense_attention_gave_is_learned(run, tmp_path) -> None:
    words = ("--config", "sparsity=0.9", "--target", "dense", "--weights", "all", "--batch", "4")
    assert run(*words, "--lr", "5e-5", "--steps", "40", "--every", "20") == 0
    gaps = [float(row["gap"]) for row in table(tmp_path / "out") if row["gap"]]
    assert gaps[-1] < 0.98 * gaps[0]


def test_clips_train_a_lora_that_is_part_of_the_result(run, tmp_path) -> None:
    import imageio.v3 as iio

    data = tmp_path / "clips"
    data.mkdir()
    frames = torch.randint(0, 256, (12, 32, 48, 3), dtype=torch.uint8).numpy()
    iio.imwrite(data / "one.mp4", frames, fps=8)
    words = ("--backend", "sla_attn", "--config", "topk_ratio=0.1,BLKQ=64", "--steps", "2")
    assert run(*words, "--data", str(data)) == 2  # without a prompt
    (data / "one.txt").write_text("a noisy clip")
    assert run(*words, "--data", str(data)) == 0
    keys = keys_of(tmp_path / "out")
    assert "blocks.0.attn1.proj_l.weight" in keys
    assert not any("lora" in key for key in keys)


def test_what_has_nothing_to_train_is_refused(run, capsys) -> None:
    config = '{"window": [1, 1, 1], "tile_size": [1, 2, 2]}'
    words = ("--backend", "sliding_tile_attn", "--config", config)
    assert run(*words, "--weights", "new", "--steps", "1") == 2
    assert "--weights new must be given with a backend that makes new parts" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--height", "130"), "--height and --width must be multiples of 16, got 130 and 128"),
        (("--data", "nowhere"), "--data must be a folder with clips"),
        (("--resume",), "--resume needs a state in"),
        (("--steps", "0"), "argument --steps: must be above 0, got 0"),
        (("--lr", "-1"), "argument --lr: must be above 0, got -1"),
        (("--every", "x"), "argument --every: invalid int value: 'x'"),
        (("--dtype", "half"), "argument --dtype: invalid choice: 'half'"),
    ],
)
def test_bad_requests_are_one_line(run, capsys, words, match) -> None:
    try:
        status = run(*words)
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert match in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told(run, capsys) -> None:
    script = sys.modules["train_sparse"]
    assert script.main(["no/such/model", "out", *SMALL]) == 2
    assert "model must be the folder or the name of a Wan pipeline" in capsys.readouterr().err
