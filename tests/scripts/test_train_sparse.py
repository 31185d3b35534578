"""A small fine-tuning run: what it learns from, what it writes, and what it refuses."""

import csv
import importlib
import itertools
import shutil
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
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the first run's precision
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


def test_the_loss_falls_a_run_goes_on_and_the_folder_is_enough(run, tmp_path, capsys) -> None:
    words = ("--config", "sparsity=0.9", "--weights", "all", "--lr", "0.002", "--every", "10")
    assert run(*words, "--steps", "20") == 0
    lines = capsys.readouterr().out.splitlines()  # of no terminal
    assert [line.partition(":")[0] for line in lines[:2]] == ["step 0 of 20", "step 10 of 20"]
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


def test_encoded_clips_are_read_from_a_file(run, tiny_pipeline, tmp_path, capsys) -> None:
    from safetensors.torch import save_file

    config = diffusers.WanTransformer3DModel.load_config(
        tiny_pipeline("wan"), subfolder="transformer"
    )
    channels, width = config["in_channels"], config["text_dim"]
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        "latents": torch.randn(2, channels, 3, 16, 16, generator=drawn),
        "prompts": torch.randn(2, 8, width, generator=drawn),
    }
    data = tmp_path / "clips.safetensors"
    save_file(tensors, data)
    words = ("--data", str(data), "--steps", "2", "--lr-scheduler", "cosine")
    assert run(*words) == 0
    assert len(losses(table(tmp_path / "out"))) == 2
    save_file({**tensors, "latents": tensors["latents"][:, :, :2].clone()}, data)
    shutil.rmtree(tmp_path / "out")
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert f"latents ['N', {channels}, 3, 16, 16]" in said
    assert f"got [2, {channels}, 2, 16, 16]" in said
    data.write_bytes(b"nothing")
    assert run(*words) == 2
    assert "--data must be a file that can be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_rate_falls_to_nothing_over_the_steps(run) -> None:
    script, rates = sys.modules["train_sparse"], []
    train = script.Run.train

    def noting(self, batch):
        rates.append(self.optimizer.param_groups[0]["lr"])
        return train(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Run, "train", noting)
        words = ("--steps", "20", "--lr", "0.01", "--lr-scheduler", "linear", "--every", "99")
        assert run(*words) == 0
    assert rates[0] == 0  # the warm-up, of one step
    assert rates[1] == 0.01
    assert all(after < before for before, after in itertools.pairwise(rates[1:]))
    assert 0 < rates[-1] < 0.001


def test_a_run_that_is_done_goes_on_from_its_end(run, tmp_path, capsys) -> None:
    assert run("--steps", "3", "--every", "2") == 0
    assert run("--steps", "2", "--resume") == 2
    assert "--steps must be at least the 3 taken, got 2" in capsys.readouterr().err


def test_steps_that_would_not_reach_the_optimiser_are_refused(run, capsys) -> None:
    with pytest.raises(SystemExit):
        run("--steps", "3", "--accumulate", "4")
    assert "--steps must be a multiple of --accumulate, got 3 and 4" in capsys.readouterr().err


def test_the_loss_and_the_distance_have_an_axis_each(run, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    (tmp_path / "loss.csv").write_text("step,loss,gap\n0,0.5,0.9\n1,0.4,\n2,,0.7\n")
    sys.modules["train_sparse"].plot(tmp_path / "loss.csv", tmp_path / "loss.png")
    above, below = drawn[0].axes
    assert (above.get_ylabel(), above.lines[0].get_ydata().tolist()) == (
        "loss: mean squared error",
        [0.5, 0.4],
    )
    assert (below.get_ylabel(), below.lines[0].get_xdata().tolist()) == (
        "distance from dense, relative",
        [0, 2],
    )


def weights_of(folder):
    (file,) = (folder / "transformer").glob("*.safetensors")
    from safetensors.torch import load_file

    return load_file(file)


def test_steps_at_small_rates_are_not_rounded_away(run, tiny_pipeline, tmp_path) -> None:
    """Many steps of 1e-5 show in weights of bf16, where fp32 added them up."""
    words = ("--dtype", "bfloat16", "--weights", "all", "--lr", "1e-3", "--steps", "40")
    assert run(*words) == 0
    before = weights_of(Path(tiny_pipeline("wan")))
    moved = total = 0
    for name, weight in weights_of(tmp_path / "out").items():
        if name in before and weight.dtype is torch.bfloat16:
            moved += int((weight != before[name].bfloat16()).sum())
            total += weight.numel()
    assert moved > 0.2 * total  # 0.09 where the steps are taken in bf16, 0.3 in fp32


def test_a_run_goes_on_only_as_it_began(run, capsys) -> None:
    words = ("--every", "1", "--steps", "1")
    assert run(*words) == 0
    for other in (("--weights", "all"), ("--backend", "sla_attn")):
        assert run("--every", "1", "--steps", "2", "--resume", *other) == 2
        assert "--resume must be given with the MODEL, --backend and --weights" in (
            capsys.readouterr().err
        )


def test_gradients_that_are_not_finite_end_a_run(run, capsys, tmp_path, monkeypatch) -> None:
    script = sys.modules["train_sparse"]
    own = script.batches

    def broken(*args):
        for batch in own(*args):
            batch.flow.fill_(float("nan"))
            yield batch

    monkeypatch.setattr(script, "batches", broken)
    assert run("--steps", "2") == 2
    assert "gradients must be finite, got a norm of nan in step 0" in capsys.readouterr().err
    assert not (tmp_path / "out" / "transformer").exists()


def test_what_dense_attention_gave_is_learned(run, tmp_path) -> None:
    words = ("--config", "sparsity=0.9", "--target", "dense", "--weights", "all", "--batch", "4")
    rate = ("--lr", "5e-5", "--lr-scheduler", "cosine", "--steps", "60", "--every", "20")
    assert run(*words, *rate) == 0
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
        (("--frames", "10"), "--frames must be a multiple of 4 plus 1, got 10; nearest 9"),
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


def test_the_result_has_a_folder_of_its_own(run, tiny_pipeline, tmp_path, capsys) -> None:
    script, model = sys.modules["train_sparse"], str(tiny_pipeline("wan"))
    assert script.main([model, model, *SMALL]) == 2
    assert "OUT must be another folder than MODEL" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert run("--steps", "1") == 2
    assert "OUT must be a new or an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_a_run_that_ended_before_its_result_was_written_writes_it(run, tmp_path) -> None:
    words = ("--steps", "2", "--every", "2", "--weights", "new")
    assert run(*words) == 0
    wanted = keys_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "transformer")
    assert run(*words, "--resume") == 0
    assert keys_of(tmp_path / "out") == wanted
    assert [row["step"] for row in table(tmp_path / "out")] == ["0", "1", "2"]


def test_a_clip_that_cannot_be_read_is_named(run, capsys, tmp_path) -> None:
    data = tmp_path / "clips"
    data.mkdir()
    (data / "one.mp4").write_bytes(b"no clip")
    (data / "one.txt").write_text("a fox")
    assert run("--data", str(data), "--steps", "1") == 2
    assert "one.mp4 must be a clip that can be read, got" in capsys.readouterr().err
