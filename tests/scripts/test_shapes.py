"""The score reads clips of shapes as their captions say, and falls with what a clip loses."""

import csv
import dataclasses
import importlib
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from multimodal_gen.runtime.comparison import perceptual
from multimodal_gen.runtime.comparison.configurations import read_configurations

FRAMES, SIDE, COUNT = 17, 64, 16
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def shapes():
    """The module that draws clips, the one that scores them, and some clips with captions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts/shapes")
        clips, score = importlib.import_module("clips"), importlib.import_module("score")
        scenes = clips.draw_scenes(3, COUNT, frames=FRAMES)
        videos = clips.render(scenes, height=SIDE, width=SIDE).permute(0, 2, 3, 4, 1).numpy()
        yield clips, score, videos, [scene.caption for scene in scenes]


@pytest.fixture(scope="module")
def train():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts/shapes")
        yield importlib.import_module("train")


def mean(shapes, change, captions=None) -> float:
    _, score, videos, own = shapes
    pairs = zip(videos, captions or own, strict=True)
    return float(np.mean([score.score(change(video), caption) for video, caption in pairs]))


def test_real_clips_hold_what_their_captions_say(shapes) -> None:
    assert mean(shapes, lambda video: video) >= 0.98


def test_bytes_and_numbers_are_read_alike(shapes) -> None:
    assert mean(shapes, lambda video: np.round(255 * video).astype(np.uint8)) >= 0.98


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda video: (255 * video).astype(np.int64), r"frames of int64 \[64, 64, 3\]"),
        (lambda video: (255 * video).astype(np.uint16), r"frames of uint16 \[64, 64, 3\]"),
        (
            lambda video: np.full_like(video, 255),
            r"frames of float32 \[64, 64, 3\] from 255 to 255",
        ),
        (lambda video: video - 1, r"frames of float32 \[64, 64, 3\] from -"),
        (
            lambda video: np.where(video == video[3, 2, 1, 0], np.nan, video),
            r"frames of \S+ \[64, 64, 3\] from nan to nan",
        ),
        (lambda video: video[:0], "no frame"),
        (lambda video: None, "no frame"),
        (lambda video: video[0], r"frames of float32 \[64, 3\]"),
        (lambda video: video[..., 0], r"frames of float32 \[64, 64\]"),
        (lambda video: video[..., [0, 1, 2, 2]], r"frames of float32 \[64, 64, 4\]"),
        (lambda video: video[:, :0], r"frames of float32 \[0, 64, 3\]"),
        (lambda video: [video[0], video[1, 1:]], r"float32 \[64, 64, 3\] and .* \[63, 64, 3\]"),
    ],
)
def test_what_is_no_clip_is_refused(shapes, change, got: str) -> None:
    _, score, videos, captions = shapes
    with pytest.raises(ValueError, match=rf"a video must be \[T, H, W, 3\], .*, got {got}"):
        score.score(change(videos[0]), captions[0])


def test_a_caption_that_is_no_text_is_refused(shapes) -> None:
    with pytest.raises(ValueError, match=r"a caption must be such as .*, got None"):
        shapes[1].score(shapes[2][0], None)


def test_captions_of_other_clips_hold_little(shapes) -> None:
    captions = shapes[3]
    assert mean(shapes, lambda video: video, captions[1:] + captions[:1]) < 0.4


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda video: np.repeat(video[:1], FRAMES, 0), id="frozen"),
        pytest.param(lambda video: video[::-1], id="backwards"),
        pytest.param(lambda video: video[..., [1, 2, 0]], id="recoloured"),
        pytest.param(lambda video: blurred(video), id="blurred"),
        pytest.param(lambda video: twice(video), id="drawn twice"),
        pytest.param(lambda video: flickering(video), id="flickering"),
        pytest.param(lambda video: np.zeros_like(video), id="black"),
    ],
)
def test_the_score_falls_with_what_a_clip_loses(shapes, change) -> None:
    assert mean(shapes, change) < 0.9


def flickering(video):
    found = video.copy()
    found[1::2] = 0
    return found


def twice(video):
    """Draw every shape again on the other side of the frame."""
    again = np.roll(video, SIDE // 2, 2)
    return np.where(np.ptp(again, axis=-1, keepdims=True) > 0.3, again, video)


def test_a_shape_that_is_drawn_twice_is_counted_twice(shapes) -> None:
    _, score, videos, captions = shapes
    still = next(i for i, caption in enumerate(captions) if " and a" not in caption)
    assert score.facts(videos[still], captions[still])["number"] == [True]
    assert score.facts(twice(videos[still]), captions[still])["number"] == [False]


def blurred(video, width: int = 13):
    found = torch.tensor(video).permute(0, 3, 1, 2)
    for _ in range(2):
        found = torch.nn.functional.avg_pool2d(found, width, 1, width // 2)
    return found.permute(0, 2, 3, 1).numpy()


def test_a_seed_draws_the_same_scenes_and_another_draws_others(shapes) -> None:
    clips = shapes[0]
    drawn = [clips.draw_scenes(seed, 4, frames=5) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_shapes_stay_inside_of_the_frame(shapes) -> None:
    for scene in shapes[0].draw_scenes(5, 50, frames=9, aspect=1.5):
        for shape in scene.shapes:
            for x, y in shape.path:
                assert shape.radius <= x <= 1.5 - shape.radius
                assert shape.radius <= y <= 1 - shape.radius


def test_a_speed_that_the_caption_does_not_say_is_no_fact(shapes) -> None:
    _, score, videos, captions = shapes
    moving = next(i for i, caption in enumerate(captions) if "quickly" in caption)
    said = captions[moving].replace("quickly ", "").replace("slowly ", "")
    assert score.score(videos[moving], said) == 1.0
    assert score.score(videos[moving], captions[moving].replace("quickly", "slowly")) < 1.0


@pytest.mark.parametrize(
    "caption",
    [
        "a fox",
        "a red ball moves right",
        "a rd ball moves right over a plain ground",
        "a red ball and a blue box move right over a plain ground",
        "a red ball moves right and a fox stands still over a plain ground",
    ],
)
def test_what_is_no_caption_is_refused(shapes, caption: str) -> None:
    with pytest.raises(ValueError, match=f"such as 'a red ball .* ground', got '{caption}'"):
        shapes[1].score(shapes[2][0], caption)


def test_a_caption_may_begin_with_a_capital_and_end_with_a_point(shapes) -> None:
    _, score, videos, captions = shapes
    assert score.score(videos[0], f"{captions[0].capitalize()}.") == 1.0


def test_videos_are_compared_with_their_caption_and_the_first(shapes, tmp_path, capsys) -> None:
    from multimodal_gen.runtime.generator.output import write_video

    _, score, videos, captions = shapes
    paths = [str(tmp_path / f"{name}.mp4") for name in ("whole", "frozen")]
    for path, clip in zip(paths, (videos[0], videos[0][:1].repeat(FRAMES, 0)), strict=True):
        write_video(clip, Path(path), fps=8)
    assert score.main([captions[0], *paths]) == 0
    whole, frozen = capsys.readouterr().out.splitlines()
    assert whole == f"{paths[0]}: 100% of the caption"
    told = rf"{paths[1]}: (\d+)% of the caption, PSNR (\S+) dB from {paths[0]}"
    found = re.fullmatch(told, frozen)
    assert int(found[1]) < 100
    wanted = score.psnr(videos[0][:1].repeat(FRAMES, 0), videos[0])
    assert float(found[2]) == pytest.approx(wanted, abs=0.5)
    assert score.psnr(videos[0], videos[0]) == math.inf


def test_a_video_that_is_not_there_is_one_line(shapes, capsys) -> None:
    with pytest.raises(SystemExit):
        shapes[1].main(["a red ball moves up over a plain ground", "nowhere.mp4"])
    assert "nowhere.mp4 must be a video: " in capsys.readouterr().err


def test_a_model_is_trained_in_pieces_and_saved(train, tmp_path, capsys) -> None:
    common = ["--size", "smoke", "--out", str(tmp_path / "state")]
    for steps in ("2", "4"):  # the second piece goes on with the state of the first
        train.main(["vae", *common, "--steps", steps])
    folder = tmp_path / "model"
    train.main(["vae", *common, "--steps", "4", "--folder", str(tmp_path / "vae")])
    words = ["transformer", *common, "--folder", str(folder), "--evaluate", "1"]
    export = ["export", *common, "--folder", str(folder)]
    with_vae = ["--vae", str(tmp_path / "vae")]

    def refusal(*more: str, of: Sequence[str] = export) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            train.main([*of, *more])
        assert not folder.exists()
        return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]

    said = capsys.readouterr().out
    state = tmp_path / "state" / "transformer.pt"
    told = f"{state} must have all 6 steps, got %s; train transformer first"
    assert refusal(*with_vae) == told % "no such file"
    torch.save({"step": 5}, state)
    assert refusal(*with_vae) == told % "5"
    state.unlink()
    of_vae = f"{tmp_path / 'state' / 'vae.pt'} must have all 12,000 steps, got 4; train vae first"
    assert refusal(of=words) == of_vae
    assert not state.exists()
    train.main([*words, *with_vae])
    said += capsys.readouterr().out
    shutil.rmtree(folder)
    assert refusal() == of_vae
    train.main([*export, *with_vae])
    said += capsys.readouterr().out
    assert "3 of 4 steps" in said
    assert "4 of 4 steps" in said
    assert "6 of 6 steps" in said
    assert re.search(r"^real: 1\.000 of facts; number 1\.000, colour 1\.000, ", said, re.MULTILINE)
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    asked = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2}
    video = pipe("a red ball moves right over a plain ground", **asked, output_type="np").frames
    assert video.shape == (1, 9, 32, 48, 3)
    assert np.isfinite(video).all()


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory) -> tuple[str, Path]:
    """The folders of an autoencoder, and of the state of a transformer."""
    folder = tmp_path_factory.mktemp("trained")
    vae, words = str(folder / "vae"), ["--size", "smoke", "--out", str(folder)]
    train.main(["vae", *words, "--steps", "1", "--folder", vae])
    train.main(["transformer", *words, "--vae", vae])
    return vae, folder


def test_training_goes_on_from_packed_weights(
    train, trained, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(train, "CURVE_EVERY", 1)
    (vae, first), then, packed = trained, tmp_path / "b", tmp_path / "weights.safetensors"
    words = ["transformer", "--size", "smoke", "--vae", vae, "--out"]
    pack = ["pack", "--out", str(first), "--folder"]
    absent = tmp_path / "a" / "transformer.pt"
    with pytest.raises(SystemExit):
        train.main(["pack", "--out", str(absent.parent), "--folder", str(tmp_path)])
    assert f"a --folder, and {absent}; train transf" in capsys.readouterr().err
    train.main([*pack, str(tmp_path)])
    state = torch.load(first / "transformer.pt")
    found = train.unpacked(packed)
    assert found["step"] == state["step"] == 6
    assert found["average"].keys() == state["average"].keys()
    for key, value in state["average"].items():
        error = (found["average"][key].float() - value.float()).abs()
        if value.ndim < 2:
            assert not error.any()
            continue
        half_a_step = value.float().flatten(1).abs().amax(1) / 254
        assert (error.flatten(1).amax(1) <= half_a_step + 1e-6).all()

    with pytest.raises(SystemExit):
        train.main([*words, str(then), "--start", str(tmp_path / "none")])
    assert "--start must be a file that `pack` has written, got " in capsys.readouterr().err
    large = dataclasses.replace(train.SIZES["smoke"], ffn=64)
    monkeypatch.setitem(train.SIZES, "smoke", large)
    with pytest.raises(ValueError, match=r"ffn\S+ of shape \[64\], got \[32\]; pass the --size"):
        train.main([*words, str(then), "--start", str(packed)])
    stages = train.SIZES["smoke"].stages
    more = dataclasses.replace(large, ffn=32, muon=True, stages=(*stages, stages[-1]))
    monkeypatch.setitem(train.SIZES, "smoke", more)
    monkeypatch.delattr(train, "learn_to_read")  # which what is there would be lost by
    train.main([*words, str(then), "--start", str(packed)])
    train.main([*words, str(then)])
    state = torch.load(then / "transformer.pt")
    assert state["step"] == 8
    assert (then / "transformer.csv").read_text().split()[1].startswith("7,")
    changed = [
        k for k, v in state["weights"].items() if not torch.equal(v, found["average"][k].half())
    ]
    assert any(key.startswith("transformer.blocks.0.attn1.to_q") for key in changed)


@pytest.fixture(scope="module")
def reading(train):
    return importlib.import_module("reading")


def test_every_word_of_a_shape_tells_all_of_it(shapes, train, reading) -> None:
    clips, *_ = shapes
    scenes = clips.draw_scenes(7, 32, frames=2)
    tokens, real, targets = reading._lesson(train.make_tokenizer(), scenes, DEVICE)
    assert int(real.sum(1).max()) == tokens.shape[1] == targets.shape[1]
    for scene, row in zip(scenes, targets.tolist(), strict=True):
        told: list[list[object]] = []
        for place, *numbers in row:
            names = zip(reading._NAMES, numbers, strict=True)
            told.append([place, *(of[number] for of, number in names)] if place >= 0 else [])
        for place, shape in enumerate(scene.shapes):
            said = [place, shape.colour, shape.kind, str(shape.motion)]
            count = len(str(shape).split())
            assert told[: count + 1] == [said] * count + [[]]  # "and", "over"
            told = told[count + 1 :]
        assert not any(told)


def test_a_text_encoder_learns_which_word_belongs_to_which(train, reading, monkeypatch) -> None:
    for name, value in {"CAPTIONS": 512, "BATCH": 32}.items():
        monkeypatch.setattr(reading, name, value)
    size = dataclasses.replace(train.SIZES["smoke"], text=64)
    tokenizer = train.make_tokenizer()
    read = []
    for steps in (1, 120):
        torch.manual_seed(0)
        text_encoder = train.make_text_encoder(size, len(tokenizer))
        read.append(reading.learn_to_read(text_encoder, tokenizer, steps))
    assert read[0] < 0.01
    assert read[1] > 0.05


def test_a_text_encoder_that_reads_stays_as_it_is(train, trained) -> None:
    torch.manual_seed(0)
    tokenizer = train.make_tokenizer()
    size = train.SIZES["smoke"]
    text_encoder = train.make_text_encoder(size, len(tokenizer)).to(train.DEVICE)
    train.learn_to_read(text_encoder, tokenizer, size.reading)
    saved = torch.load(trained[1] / "transformer.pt")
    for key, value in text_encoder.named_parameters():
        for part in ("weights", "average"):
            assert torch.equal(saved[part][f"text_encoder.{key}"], value.detach().half().cpu())


def test_the_loss_on_clips_held_out_is_noted(train, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(train, "CURVE_EVERY", 1)
    vae, folder = str(tmp_path / "vae"), tmp_path / "state"
    train.main(["vae", "--size", "smoke", "--out", str(tmp_path), "--steps", "1", "--folder", vae])
    smoke = train.SIZES["smoke"]
    # A step may have more clips than are held out.
    stage = dataclasses.replace(smoke.stages[1], steps=12, batch=5)
    long = dataclasses.replace(smoke, stages=(stage,))
    monkeypatch.setitem(train.SIZES, "smoke", long)
    seeds, clips_of, flow_matching, kept = [], train.clips_of, train.flow_matching, []

    def noted(stage, seed: int, count: int):
        seeds.append((seed, count))
        return clips_of(stage, seed, count)

    def found(*given):
        kept.append(flow_matching(*given))
        return kept[-1]

    monkeypatch.setattr(train, "clips_of", noted)
    monkeypatch.setattr(train, "flow_matching", found)
    train.main(["transformer", "--size", "smoke", "--vae", vae, "--out", str(folder)])
    assert seeds == [(train.TRAINING_SEEDS + 100_000, 2), (train.HELD_OUT_SEEDS, 2)]
    _, *rows = (folder / "transformer.csv").read_text().split()
    told = [row.split(",")[2] for row in rows]
    assert [bool(each) for each in told] == 9 * [False] + [True] + 2 * [False]
    assert f"held out {told[9]}" in capsys.readouterr().out
    _, held = kept
    assert train.mean_loss(*held)() == train.mean_loss(*held)() > 0
    assert (tmp_path / "vae.csv").read_text().splitlines()[0] == "step,loss"
    curve = folder / "transformer.csv"
    curve.write_text("step,loss\n12,0.5\n")  # as it was before
    more = dataclasses.replace(long, stages=(*long.stages, long.stages[0]))
    monkeypatch.setitem(train.SIZES, "smoke", more)
    train.main(["transformer", "--size", "smoke", "--vae", vae, "--out", str(folder)])
    lines = curve.read_text().splitlines()
    assert len(lines) == 14
    assert {line.count(",") for line in lines} == {1}


def test_evaluations_draw_neither_clips_of_the_study_nor_of_training(
    study, train, monkeypatch
) -> None:
    size, seeds, clips_of = train.SIZES["smoke"], [], train.clips_of
    stage = size.stages[-1]

    class Pipeline:
        def set_progress_bar_config(self, **_: object) -> None: ...

        def __call__(self, captions, **_: object):
            shape = (len(captions), stage.frames, stage.height, stage.width, 3)
            return SimpleNamespace(frames=np.zeros(shape, np.float32))

    def noted(stage, seed: int, count: int):
        seeds.append(seed)
        return clips_of(stage, seed, count)

    monkeypatch.setattr(train, "clips_of", noted)
    monkeypatch.setattr(train, "PIXELS", 1)
    monkeypatch.setattr(train, "LEAST_CLIPS", 1)  # that have a seed
    train.evaluate(Pipeline(), size, 6, 2)
    assert len({*seeds}) == 6
    assert min(seeds) > study.SEED + 1000
    assert max(seeds) < train.HELD_OUT_SEEDS - 1000 < train.TRAINING_SEEDS - 2000


def test_large_clips_are_made_several_at_once_and_small_ones_as_they_were(train) -> None:
    found = {
        name: [train.clips_at_once(stage, stage.clips) for stage in train.SIZES[name].stages]
        for name in ("small", "large")
    }
    assert found == {"small": [64], "large": [36] + 3 * [8]}
    assert (
        train.clips_at_once(train.SIZES["large"].stages[-1], 3) == 3
    )  # and no more than asked for


def test_tokens_that_are_drawn_stay_in_their_places(train) -> None:
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    rope, grid, patch = WanRotaryPosEmbed(32, (1, 2, 2), 64), (5, 6, 8), (1, 2, 2)
    latents = torch.randn(2, 3, 5, 12, 16)
    whole = torch.stack(rope(latents)).unflatten(2, grid)
    drawn = torch.Generator().manual_seed(0)
    for keep in ((2, 3, 4), (5, 4, 7), grid):
        positions = train.drawn_positions(grid, keep, drawn)
        for places, few, length in zip(positions, keep, grid, strict=True):
            assert len(places) == few == len(places.unique())
            assert places.min() >= 0
            assert places.max() < length
        t, h, w = positions
        found = train.tokens_at(latents, patch, positions)
        tokens = latents.unflatten(4, (8, 2)).unflatten(3, (6, 2))
        wanted = tokens[:, :, t][:, :, :, h][:, :, :, :, :, w]
        assert torch.equal(found.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)), wanted)
        train.place_tokens(rope, *positions)
        assert torch.equal(
            torch.stack(rope(found)).unflatten(2, keep),
            whole[:, :, t][:, :, :, h][:, :, :, :, w].clone(),
        )
        train.place_tokens(rope, *(torch.arange(64.0) for _ in grid))


def test_the_autoencoder_of_the_small_model_keeps_what_clips_show(shapes) -> None:
    clips, score, *_ = shapes
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained("scripts/shapes/small/vae")
    scenes = clips.draw_scenes(1, 2, frames=17)
    given = clips.render(scenes, height=128, width=128) * 2 - 1
    with torch.inference_mode():
        found = vae.decode(vae.encode(given).latent_dist.mode()).sample
    assert 10 * math.log10(4 / (found - given).square().mean()) > 30
    for clip, scene in zip(found.clamp(-1, 1), scenes, strict=True):
        assert score.score(((clip + 1) / 2).permute(1, 2, 3, 0).numpy(), scene.caption) == 1.0


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts/shapes")
        yield importlib.import_module("study")


def test_every_configuration_of_the_study_is_one_that_a_comparison_takes(study) -> None:
    found = dict(study.configurations())
    for backend, given in study.STUDY["methods"].items():
        names = [name for name in found if name.startswith(f"{backend} ")]
        assert len(names) >= len(given["budgets"]) + 1, f"{backend} has no variant"
    read = read_configurations([*found.values()])
    assert len({each.asked for each in read}) == len(found)
    assert len(dict(study.configurations("^sla_attn .*tail"))) == 1


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("sliding_tile_attn window=[1,3,3]", 0),
        ("sliding_tile_attn window=[1,3,3], dense first", 5),
        ("sparse_video_gen_2_attn svg2_top_p_kmeans=0.7, dense first", 4),
        ("skip_softmax threshold=0.1, dense first", 7),  # by its noise levels
    ],
)
def test_steps_that_the_same_serves_are_of_one_kind(study, name: str, dense: int) -> None:
    import multimodal_gen

    model, inputs = study._wan(study.SIZES["smoke"], heads=1)
    pipe = study.make_pipeline(None, None, None, model, shift=3.0)
    pipe.scheduler.set_timesteps(20)
    now = pipe.scheduler.timesteps[:1]
    (asked,) = (text for found, text in study.configurations() if found == name)
    (configuration,) = read_configurations([asked])
    with torch.inference_mode(), multimodal_gen.apply(pipe, scope=configuration.scope):
        found = study.kinds_of_steps(lambda: model(**inputs, timestep=now), 20)
    wanted = [[*range(dense)], [*range(dense, 20)]]
    assert found == [steps for steps in wanted if steps]


def test_a_few_steps_of_a_kind_stand_for_all_of_them(study) -> None:
    ran: list[list[int]] = []

    def run(steps) -> float:
        ran.append([*steps])
        return sum(10.0 if step == 5 else 1.0 for step in steps)  # the first of a kind takes long

    assert study.seconds_of(run, [*range(5, 20)]) == 10 + 14
    assert study.seconds_of(run, [3]) == 1
    assert study.seconds_of(run, [3, 4]) == 2
    assert ran == [[5], [6, 11, 16], [3], [3], [4]]


def test_a_density_is_of_as_many_steps_as_each_stands_for(study) -> None:
    entry = SimpleNamespace(densities=((5, 1.0), (6, 0.2), (11, 0.4), (16, 0.6)))
    weights = study.weights_of([*range(5, 20)])
    assert weights == {5: 1.0, 6: 14 / 3, 11: 14 / 3, 16: 14 / 3}
    layer = SimpleNamespace(entries=[entry], detours=[])
    assert study.density_of(layer, weights) == pytest.approx((1.0 + 14 * 0.4) / 15)
    dense = SimpleNamespace(entries=[SimpleNamespace(densities=(), density=None, calls=4)])
    dense.detours = []
    assert study.density_of(dense, weights) == 1.0


def test_dense_layers_are_as_large_a_share_of_a_larger_model(study) -> None:
    text = 'sol_attn:{"dense_layers": "0-1", "topk_ratio": 0.1}'
    spread = json.loads(study.spread(text, 3, 6).partition(":")[2])
    assert spread == {"dense_layers": [0, 1, 3, 4], "topk_ratio": 0.1}
    for plain in ("sage_attn", 'sol_attn:{"dense_layers": null}', 'sla_attn:{"topk_ratio": 0.1}'):
        assert study.spread(plain, 3, 6) == plain


def test_rows_without_the_files_they_were_made_of_are_not_lost(study, tmp_path) -> None:
    def add(name: str, captions: str) -> None:
        row = {"name": "a", "status": "done", "clips": len(captions), "score": 0.5}
        study.write([row], tmp_path / f"{name}.csv")
        clips = [{"name": "a", "caption": x, "seed": 0, "score": 0.5} for x in captions]
        study.write(clips, tmp_path / f"{name}_clips.csv")

    given = SimpleNamespace(out=tmp_path)
    add("front", "xy")
    study._gather("front", given)
    assert study.read(tmp_path / "front.csv")[0]["clips"] == "2"
    add("front-1", "z")
    with pytest.raises(SystemExit, match=r"front.csv has captions that no front-NUMBER.csv"):
        study._gather("front", given)
    add("front-0", "xy")
    study._gather("front", given)
    study._gather("front", given)
    assert study.read(tmp_path / "front.csv")[0]["clips"] == "3"


def test_self_attention_is_timed_on_what_the_shapes_model_gives_it(study) -> None:
    import multimodal_gen
    from multimodal_gen.runtime.layers.attention.call import watching

    size = study.SIZES["smoke"]
    model, inputs = study._wan(size, heads=2)
    pipe = study.make_pipeline(None, None, None, model, shift=3.0)
    pipe.scheduler.set_timesteps(20)
    shape = (1, 3 * 4 * 6, 2, size.head_size)
    learnt = {step: [tuple(torch.randn(shape) for _ in range(3))] for step in range(0, 20, 2)}
    outs: dict[int, list[torch.Tensor]] = {}

    def look(layer, call, serve) -> torch.Tensor:
        out = study._feed(learnt)(layer, call, serve)
        outs.setdefault(step, []).append(out)
        return out

    for step in (5, 18, 19):
        now = pipe.scheduler.timesteps[step : step + 1]
        with torch.inference_mode(), multimodal_gen.apply(pipe), watching(look):
            model(**inputs, timestep=now)
    for step, of in ((5, 4), (18, 18), (19, 18)):
        self_attention, cross_attention = outs[step]
        query, key, value = (x.transpose(1, 2) for x in learnt[of][0])
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        assert torch.allclose(self_attention, wanted.transpose(1, 2), atol=1e-5)
        assert not torch.allclose(cross_attention, self_attention, atol=1e-2)


def test_times_are_rows_at_once_and_the_same_command_goes_on(study, tmp_path, monkeypatch) -> None:
    scopes: list[str] = []

    def timed(pipe, inputs, scope, learnt) -> tuple[float, float]:
        scopes.append(str(scope and scope.default.backend))
        if len(scopes) == 3:
            raise KeyboardInterrupt
        if len(scopes) == 2:
            raise RuntimeError("no memory\nmore")
        return 1.0, 0.5

    monkeypatch.setattr(study, "_timed", timed)
    monkeypatch.setattr(study, "learnt_by", lambda *_: {0: []})
    (tmp_path / "model_index.json").touch()
    words = ["times", "--size", "smoke", "--model", str(tmp_path), "--out", str(tmp_path)]
    words += ["--only", "^sage_attn", "--commit", "abc"]
    with pytest.raises(KeyboardInterrupt):
        study.main(words)
    first = study.read(tmp_path / "times.csv")
    assert [(row["name"], row["status"], row["seconds"]) for row in first] == [
        ("torch_sdpa", "done", "2.0"),
        ("auto", "failed: no memory", ""),
    ]
    # One of two processes, which share out what is left otherwise, and then one that does it all.
    study.main([*words, "--processes", "2", "--shard", "1"])
    assert study.main(words) == 0
    assert scopes[3:] == ["None", "sage_attn"]
    rows = study.read(tmp_path / "times.csv")
    assert [row["name"] for row in rows] == ["torch_sdpa", "auto", "sage_attn"]
    assert {row["status"] for row in rows} == {"done"}
    columns = ("name", "configuration", "status", "seconds", "density", "gpu", "torch", "commit")
    assert tuple(rows[0]) == columns


def test_a_row_of_a_failure_gives_way_to_a_later_one(study) -> None:
    rows = [
        {"name": "a", "status": "failed", "score": ""},
        {"name": "b", "status": "done", "score": "1"},
        {"name": "a", "status": "done", "score": "0.5"},
        {"name": "b", "status": "out of memory", "score": ""},
    ]
    assert [(row["name"], row["score"]) for row in study.once(rows)] == [("a", "0.5"), ("b", "1")]
    clips = [{"name": "a", "caption": "x", "seed": seed} for seed in (0, 1, "0")]
    assert len(study.once(clips)) == 2


def test_the_front_is_what_nothing_clearly_beats_in_score_and_time(study) -> None:
    found = {
        "torch_sdpa": ("done", "0.9", 20.0),
        "best": ("done", "0.9", 4.0),
        "as good, hardly slower": ("done", "0.9", 4.1),
        "as good, slower": ("done", "0.9", 4.3),
        "hardly worse, slower": ("done", "0.88", 4.1),
        "worse": ("done", "0.86", 4.05),
        "fast": ("done", "0.81", 1.0),
        "too bad": ("done", "0.79", 0.5),
        "not timed": ("done", "1.0", None),
        "lost": ("failed", "", 0.5),
    }
    rows = [
        {"configuration": name, "status": status, "score": score}
        for name, (status, score, _) in found.items()
    ]
    seconds = {name: took for name, (*_, took) in found.items() if took is not None}
    wanted = ["best", "as good, hardly slower", "hardly worse, slower", "fast"]
    assert study.front_of(rows, seconds) == wanted


def test_small_errors_of_layers_are_no_zeros_in_rows(study) -> None:
    def run(name: str, *cosines: float) -> SimpleNamespace:
        layers = [SimpleNamespace(cosine=(1.0, x), backend=name) for x in cosines]
        rest = {"status": "done", "generations": [], "differences": {}, "cost": None}
        return SimpleNamespace(configuration=name, layers=layers, frames_mean=None, **rest)

    report = SimpleNamespace(
        reference=run("dense", 1.0, 1.000000119),  # which rounding may give
        floor=(),
        candidates=(run("a", 0.999999, 0.9999987654), run("b", 0.7, 0.65433)),
        environment=SimpleNamespace(device="cpu", versions={}),
    )
    rows = [*study.rows_of(report, {}, "abc")]
    assert [row["layer_error"] for row in rows] == [0.0, 1.12e-06, 0.323]
    parts = [
        {"name": "a", "status": "done", "clips": clips, "layer_error": error}
        for clips, error in (("2", "1.12e-06"), ("1", "4e-06"))
    ]
    assert study.merged(parts, [])[0]["layer_error"] == 2.08e-06


def test_the_error_of_layers_is_of_calls_that_the_method_served(study) -> None:
    def error(*layers: tuple[str, float]) -> float | None:
        found = [SimpleNamespace(backend=name, cosine=(cosine,)) for name, cosine in layers]
        asked = 'sla_attn:{"dense_steps": "0"}'
        return study._layer_error(SimpleNamespace(configuration=asked, layers=found))

    assert error(("torch_sdpa", 1.0), ("sla_attn (triton)", 0.75)) == 0.25
    assert error(("torch_sdpa", 1.0)) is None
    assert error() is None


def test_rows_of_some_captions_each_become_one_of_all(study) -> None:
    clips = [
        {"name": name, "caption": caption, "seed": seed, "score": score}
        for name, scores in {"torch_sdpa": (1.0, 0.8, 0.6), "a": (1.0, 0.4, 0.5)}.items()
        for (caption, seed), score in zip((("x", 0), ("x", 1), ("y", 0)), scores, strict=True)
    ]
    rows = [
        {"name": "torch_sdpa", "status": "done", "clips": "2", "score": "0.9"},
        {"name": "a", "status": "done", "clips": "2", "score": "0.7", "difference": "9"},
        {"name": "torch_sdpa", "status": "done", "clips": "1", "score": "0.6"},
        {"name": "a", "status": "failed", "clips": "0", "score": "", "difference": "", "psnr": ""},
        {"name": "a", "status": "done", "clips": "1", "score": "0.5", "psnr": "20"},
    ]
    dense, sparse = study.merged(rows, clips)
    assert dense == {"name": "torch_sdpa", "status": "done", "clips": 3, "score": 0.8}
    assert (sparse["clips"], sparse["score"], sparse["psnr"]) == (3, 0.63333, 20.0)
    assert sparse["status"] == "failed"  # is told, as some of the captions are missing
    rows[3:4] = []
    (_, sparse) = study.merged(rows, clips)
    # By caption, whose seeds count as one: -0.2 and -0.1, of which Student's interval is wide.
    assert sparse["difference"] == -0.15
    assert sparse["low"] < -0.5 < 0.3 < sparse["high"]
    # After training, the difference is to dense attention of what was trained.
    clips += [{**clip, "name": "a, then dense", "score": "0.5"} for clip in clips[3:]]
    assert study.merged(rows, clips)[1]["difference"] == 0.1


def test_curves_and_clips_are_drawn_from_rows_and_comparisons(study, tmp_path) -> None:
    pictures = importlib.import_module("pictures")
    (tmp_path / "screen-0" / "clips").mkdir(parents=True)
    names = {text: name for name, text in study.configurations("^(sla|sol)_attn|^sage_attn")}
    scored = [{"name": "torch_sdpa", "configuration": "torch_sdpa", "score": 1.0}]
    scored += [{"name": x, "configuration": text, "score": 0.5} for text, x in names.items()]
    scored[-1]["score"] = None  # failed
    study.write(scored, tmp_path / "screen.csv")
    timed = [{"configuration": row["configuration"], "seconds": 2.0} for row in scored]
    study.write(timed, tmp_path / "times.csv")
    assert len(pictures.joined(tmp_path)) == len(scored) - 1
    runs = []
    for number, text in enumerate(["torch_sdpa", *names]):
        path = f"clips/{number}.npy"
        np.save(tmp_path / "screen-0" / path, np.full((9, 48, 80, 3), 10 * number, np.uint8))
        runs.append({"configuration": text, "generations": [{"prompt": 2, "frames_path": path}]})
    report = {"reference": runs[0], "candidates": runs[1:]}
    (tmp_path / "screen-0" / "report-0.json").write_text(json.dumps(report))
    study.main(["pictures", "--model", "none", "--out", str(tmp_path)])
    assert (tmp_path / "study.svg").read_text().count("sla_attn") >= 1
    from PIL import Image

    shown = 1 + sum(x in names.values() for x in study.STUDY["shown"])
    with Image.open(tmp_path / "clips.jpg") as picture:
        assert picture.size == (5 * 208, shown * (125 + 22))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["times", "--model", "none"],
            "--model must be the folder of a pipeline, with its model_index.json, got 'none'; ",
        ),
        (["screen", "--only", "("], "--only must be a regular expression, got '(': missing ), "),
        (["screen", "--only", "nobody"], "--only of screen must match one of 'sage_attn', 'slid"),
        (["screen", "--only", "^auto$"], "--only of screen must match one of 'sage_attn', 'slid"),
        (["trained", "--only", "radial"], "--only of trained must match one of 'video_sparse_attn"),
        (["all", "--only", "nobody"], "--only of all must match one of 'sage_attn', 'slid"),
        (["times", "--processes", "0"], "--processes must be at least 1, got 0; leave it out"),
        (["front", "--captions", "0"], "--captions must be at least 1, got 0; leave it out"),
        (["trained", "--steps", "-1"], "--steps must be at least 1, got -1; leave it out"),
    ],
)
def test_options_that_no_part_can_use_are_one_line(study, tmp_path, capsys, words, told) -> None:
    with pytest.raises(SystemExit, match="2"):
        study.main(
            [words[0], "--model", "scripts/shapes/small", "--out", str(tmp_path), *words[1:]]
        )
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.partition("error: ")[2].startswith(told)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("part", "only"),
    [
        ("screen", "sla_attn"),
        ("front", "sage"),
        ("trained", "LoRA"),
        ("all", "LoRA"),
        ("times", "^auto$"),
    ],
)
def test_a_part_is_asked_for_what_it_has(study, tmp_path, monkeypatch, part, only) -> None:
    asked = []
    monkeypatch.setattr(study, "PARTS", dict.fromkeys(study.PARTS, asked.append))
    monkeypatch.setattr(study, "_front", lambda given: ["sage_attn"])
    words = [part, "--model", "scripts/shapes/small", "--out", str(tmp_path), "--only"]
    assert study.main([*words, only]) == 0
    assert asked
    if part == "front":
        with pytest.raises(SystemExit, match="2"):
            study.main([*words, "sla_attn"])


@pytest.mark.parametrize("part", ["front", "pictures"])
def test_parts_that_are_made_of_rows_say_which_they_lack(study, tmp_path, part: str) -> None:
    words = [part, "--model", "scripts/shapes/small", "--out", str(tmp_path)]
    told = f"^{part} needs the rows of times and screen in {tmp_path}; run times and screen first$"
    with pytest.raises(SystemExit, match=told):
        study.main(words)
    (tmp_path / "screen.csv").touch()
    with pytest.raises(SystemExit, match="the rows of times in"):
        study.main(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["screen"], "--perceptual must be given with front or all, got screen"),
        (["front"], "--perceptual must have its packages, which are not installed; install"),
    ],
)
def test_perceptual_metrics_that_cannot_be_had_are_refused(
    study, tmp_path, monkeypatch, capsys, words, told
) -> None:
    monkeypatch.setattr(perceptual, "available", lambda: ("pycvvdp",))
    words = [*words, "--model", "scripts/shapes/small", "--out", str(tmp_path), "--perceptual"]
    with pytest.raises(SystemExit, match="2"):
        study.main(words)
    assert capsys.readouterr().err.splitlines()[-1].partition("error: ")[2].startswith(told)


def write_front(study, folder: Path, names: dict[str, str], scores: Sequence[float]) -> None:
    """Write the rows of a front of two pieces."""
    for piece in ("front-0", "front-1"):
        rows, clips = [], []
        for (text, name), score in zip(names.items(), scores, strict=True):
            row = {"name": name, "configuration": text, "status": "done", "clips": 2}
            if text != study.DENSE:
                row |= {**dict.fromkeys(study.APART, score - 1), **dict.fromkeys(study.METRICS)}
            rows.append({**row, "score": score})
            kept = {"name": name, "seed": 0, "score": score}
            clips += [{**kept, "caption": f"{piece} {caption}"} for caption in "xy"]
        study.write(rows, folder / f"{piece}.csv")
        study.write(clips, folder / f"{piece}_clips.csv")


def test_the_best_of_the_front_have_perceptual_metrics_where_they_are_asked_for(
    study, tmp_path, monkeypatch
) -> None:
    names = {"torch_sdpa": "torch_sdpa", "a:{}": "good", "b:{}": "bad"}
    figures: dict[str, float | None] = {"st_lpips": 0.125, "cvvdp": 9.5}
    asked: list[tuple[list[str], int, bool]] = []

    def compared(pipe, given, part, scenes, texts, to, *, noise, perceptual):
        asked.append((texts, len(scenes), perceptual))
        run = {"status": "done", "generations": (), "layers": (), "differences": {}, "cost": None}
        mean = SimpleNamespace(**{**dict.fromkeys(study.METRICS, 0.0), **figures})
        return SimpleNamespace(
            reference=SimpleNamespace(configuration="torch_sdpa", frames_mean=None, **run),
            candidates=[SimpleNamespace(configuration=x, frames_mean=mean, **run) for x in texts],
            floor=(),
            notes=("CVVDP: no display",),
            environment=SimpleNamespace(device="cpu", versions={}),
        )

    monkeypatch.setattr(study, "compared", compared)
    monkeypatch.setattr(study, "_pipeline", lambda _: None)
    monkeypatch.setattr(study, "_front", lambda _: [*names])
    monkeypatch.setattr(study, "configurations", lambda only="": ((y, x) for x, y in names.items()))
    monkeypatch.setattr(study, "PARTS", {"front": lambda _: None})
    monkeypatch.setattr(perceptual, "available", lambda: ("stlpips_pytorch", "pycvvdp"))
    write_front(study, tmp_path, names, (1.0, 1.0, 0.5))
    words = ["front", "--model", "scripts/shapes/small", "--out", str(tmp_path)]

    def files() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.glob("*.csv")}

    study.main(words)
    before = files()
    figures["cvvdp"] = None
    with pytest.raises(SystemExit, match="could not be measured: CVVDP: no display"):
        study.main([*words, "--perceptual"])
    assert files() == before
    figures["cvvdp"] = 9.5
    study.main([*words, "--perceptual"])
    assert asked == 2 * [(["a:{}"], study.TOGETHER, True)]
    found = {row["name"]: row for row in study.read(tmp_path / "front.csv")}
    assert [found[name]["cvvdp"] for name in names.values()] == ["", "9.5", ""]
    assert found["good"]["st_lpips"] == "0.125"
    for row in found.values():
        row |= {"st_lpips": "", "cvvdp": ""}
    assert [*found.values()] == [*csv.DictReader(before["front.csv"].splitlines())]
    study.main([*words, "--perceptual"])  # they are measured once
    assert len(asked) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # diffusers' own
def test_the_study_goes_from_a_model_to_rows(study, train, tmp_path, monkeypatch) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    words = ["--size", "smoke", "--out", str(tmp_path / "state")]
    train.main(["vae", *words, "--steps", "2", "--folder", str(tmp_path / "vae")])
    train.main(["transformer", *words, "--vae", str(tmp_path / "vae"), "--folder", str(model)])
    monkeypatch.setitem(study.STUDY, "steps", 2)
    for name, figure in {"LOSS": 1, "CLEAR": 2, "FASTER": 0, "PICTURED": 0}.items():
        monkeypatch.setattr(study, name, figure)  # nothing is learnt in so few steps
    words = ["--size", "smoke", "--model", str(model), "--out", str(out), "--commit", "abc"]
    words += ["--captions", "2", "--steps", "2"]
    only = r"sla_attn.* (topk_ratio=)?0\.1$|^video_sparse_attn (sparsity=0.9$|0.9, trained whole)"
    only = ["--only", only]
    # Two processes share one of the parts; the same command finds what is there.
    for part in ("times", "screen", "front", "trained", "pictures"):
        shared = ["--processes", "2"] if part == "times" else []
        monkeypatch.setattr(study, "TOGETHER", 1 if part == "front" else 4)
        assert study.main([part, *words, *only, *shared]) == 0
    timed, screened, fronts, trained = (
        study.read(out / f"{part}.csv") for part in ("times", "screen", "front", "trained")
    )
    ours = "sla_attn topk_ratio=0.1"
    assert {row["name"] for row in timed} >= {"torch_sdpa", "auto", ours}
    assert all(float(row["seconds"]) > 0 for row in timed)
    found = {row["name"]: row for row in screened}
    assert float(found["real clips"]["score"]) > float(found["captions swapped"]["score"])
    assert 0 < float(found[ours]["density"]) < 1
    assert found[ours]["commit"] == "abc"
    dense = next(row for row in fronts if row["name"] == "torch_sdpa")
    assert len([*out.glob("front-*_clips.csv")]) == 2  # one for each caption
    assert dense["clips"] == "4"  # two seeds
    clips = study.read(out / "trained_clips.csv")
    assert len(clips) == 2 * 2 * 2  # captions, seeds, dense and sparse
    assert {row["name"] for row in trained} == {row["name"] for row in clips}
    # What the page is made of.
    monkeypatch.syspath_prepend("scripts")
    page = importlib.import_module("study_page")

    def rows_of(file: str) -> list[dict[str, str]]:
        return study.read(out / file.removeprefix("study_"))

    blocks = [f"{x} sla_attn" if x == "settings" else x for x in page.BLOCKS]
    told = {block: "\n".join(page.lines_of(block, rows_of)) for block in blocks}
    assert "- **`sla_attn`**: " in told["when"]
    assert "| video_sparse_attn 0.9, trained whole | " in told["trained"]
    assert all("at abc" in block for block in told.values())
