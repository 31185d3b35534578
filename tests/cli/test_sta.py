import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multimodal_gen.cli.sta import _skip
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    SearchFile,
    find_searches,
    search_name,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    StrategyRecord,
    load_strategy,
)
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.helpers.flags import changed

TILE = "1,2,2"
TILES = (3, 2, 3)  # of the tiny Wan's latent grid 3x4x6
STEPS = 3
SIZE = ("--height", 64, "--width", 96, "--num-frames", 9, "--num-inference-steps", STEPS)
RUN = (*SIZE, "--guidance-scale", 3, "--seed", 0)


@pytest.fixture
def search(sglang, tiny_pipeline, tmp_path):
    """Return a function that searches on the tiny Wan, into the folder `searches`."""

    def run(*arguments: object):
        model = ("--model-path", tiny_pipeline("wan"), *RUN, "--tile-size", TILE)
        given = (*model, "--output", tmp_path / "searches")
        return sglang("attention", "sta", "search", *changed(given, arguments))

    return run


@pytest.fixture
def latents(sglang, tiny_pipeline, tmp_path):
    """Return a function that generates on the tiny Wan and returns latents and record."""

    def run(name: str, *arguments: object) -> tuple[torch.Tensor, dict]:
        out = tmp_path / name
        model = ("--model-path", tiny_pipeline("wan"), *RUN, "--prompt", "a fox")
        given = (*model, "--output-path", out, "--save-latents")
        outcome = sglang("generate", *changed(given, arguments))
        assert outcome.code == 0, outcome.err
        (file,), (record,) = out.glob("*.safetensors"), out.glob("*.json")
        return load_file(file)["latents"], json.loads(record.read_text())

    return run


def _sta(config: dict) -> tuple[str, ...]:
    config = {"tile_size": [1, 2, 2], **config}
    return (
        *("--attention-backend", "sliding_tile_attn"),
        *("--attention-backend-config", json.dumps(config)),
    )


def _strategy(path: Path, *windows: tuple[int, int, int]) -> Path:
    """Write a strategy with one window per step for 2 layers of 4 heads."""
    Strategy(windows=tuple(((window,) * 4,) * 2 for window in windows)).write(path)
    return path


def test_a_search_a_tune_and_an_inference_from_the_command_line(
    search, sglang, latents, tmp_path
) -> None:
    outcome = search("--prompt", "a fox", "--prompt", "a cat")
    assert outcome.code == 0, outcome.err
    assert "windows on 3x2x3 tiles: 1x1x1, " in outcome.out
    assert "[2/2] " in outcome.out
    searches, strategy = tmp_path / "searches", tmp_path / "mask_strategy.json"
    files = find_searches(searches)
    assert [file.parent.name for file in files] == ["mask_search_result_pos_96x64"] * 2
    found = SearchFile.read(files[0])
    assert found.l2.shape[1:] == (STEPS, 2, 4)
    assert bool((found.l2 > 0).all())

    both = ("--searches", searches, "--negative", searches)
    outcome = sglang(
        *("attention", "sta", "tune", *both, "--skip-time-steps", 1, "--output", strategy)
    )
    assert outcome.code == 0, outcome.err
    assert "3 steps x 2 layers x 4 heads, 3x2x3 tiles, from 4 searches" in outcome.out
    tuned = load_strategy(strategy)
    assert {w for layer in tuned.windows[0] for w in layer} == {TILES}
    assert TILES not in {w for step in tuned.windows[1:] for layer in step for w in layer}
    assert tuned.made_for == StrategyRecord(tiles=TILES, tile_size=(1, 2, 2))

    config = {"mask_strategy_file_path": str(strategy), "skip_time_steps": 1}
    sparse, record = latents("sparse", *_sta(config))
    dense, _ = latents("dense", "--attention-backend", "torch_sdpa")
    assert sparse.isfinite().all()
    assert not torch.equal(sparse, dense)
    entries = [
        entry
        for layer in record["attention"]["layers"]
        if (layer["component"], layer["role"]) == ("transformer", "self")
        for entry in layer["entries"]
    ]
    calls = {entry["backend"]: entry["calls"] for entry in entries}
    assert calls == {"torch_sdpa": 2, "sliding_tile_attn": 4}  # two branches of guidance
    densities = [e["density_by_step"] for e in entries if e["backend"] == "sliding_tile_attn"]
    assert len(densities) == 2  # one per layer
    for layer, by_step in enumerate(densities):
        assert by_step == {
            str(step): pytest.approx(tuned.density(TILES)[step][layer]) for step in (1, 2)
        }


@pytest.mark.slow
def test_full_windows_give_the_latents_of_dense_attention(latents, tmp_path) -> None:
    dense, _ = latents("dense", "--attention-backend", "torch_sdpa")
    full, _ = latents("full", *_sta({"window": [99, 99, 99], "skip_time_steps": 0}))
    torch.testing.assert_close(full, dense, atol=1e-5, rtol=0)
    path = _strategy(tmp_path / "full.json", *[TILES] * STEPS)
    config = {"mask_strategy_file_path": str(path), "skip_time_steps": 0}
    from_file, _ = latents("file", *_sta(config))
    torch.testing.assert_close(from_file, dense, atol=1e-5, rtol=0)


def test_an_interrupted_search_goes_on_where_it_was(search, tmp_path) -> None:
    assert search("--prompt", "a fox").code == 0
    (file,) = find_searches(tmp_path / "searches")
    before = file.stat().st_mtime_ns
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\n\na cat\na cat\n")
    outcome = search("--prompts", prompts)
    assert outcome.code == 0, outcome.err
    assert "1 of 2 prompts are done already" in outcome.out
    assert outcome.out.count("[2/2]") == 1
    assert "[1/2]" not in outcome.out
    assert len(find_searches(tmp_path / "searches")) == 2
    assert file.stat().st_mtime_ns == before

    outcome = search("--prompts", prompts)
    assert (outcome.code, "2 of 2 prompts are done already" in outcome.out) == (0, True)
    assert outcome.out.rstrip().endswith("mask_strategy.json --skip-time-steps 1")


@pytest.mark.slow
def test_what_commands_say_comes_next_works(search, sglang, monkeypatch, tmp_path, latents) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = search("--prompt", "a fox")
    tune = shlex.split(outcome.out.rpartition("next: ")[2])
    outcome = sglang(*tune[1:])
    assert outcome.code == 0, outcome.err
    generate = shlex.split(outcome.out.rpartition("next: ")[2])
    assert generate[:3] == ["sglang", "generate", "..."]
    _, record = latents("out", *generate[3:])
    backends = {
        entry["backend"] for layer in record["attention"]["layers"] for entry in layer["entries"]
    }
    assert "sliding_tile_attn" in backends


@pytest.mark.parametrize(
    ("num_steps", "option"), [(1, 0), (2, 1), (3, 1), (4, 1), (15, 4), (16, None), (50, None)]
)
def test_the_option_for_dense_steps_fits_the_run(num_steps, option) -> None:
    expected = "" if option is None else f" --skip-time-steps {option}"
    assert _skip(num_steps) == expected


@pytest.mark.slow
def test_a_search_with_other_settings_is_not_mixed_in(search) -> None:
    assert search("--prompt", "a fox", "--window", "1,1,1").code == 0
    outcome = search("--prompt", "a fox", "--window", "3,1,1")
    assert outcome.code == 2
    assert "must not hold a search with other settings" in outcome.err
    assert "windows [[1, 1, 1]], this search has [[3, 1, 1]]; name another folder" in outcome.err


def test_search_errors_are_one_line(search, tmp_path) -> None:
    for arguments, message in (
        ((), "a search must have at least one prompt, got none; give --prompt or --prompts"),
        (("--prompt", "a", "--height", "127"), "--height must be a multiple of 16 for WanPipel"),
        (("--prompts", tmp_path / "absent"), "--prompts must be a readable file, got"),
        (("--prompt", "a", "--window", "3,3"), "--window must be three integers >= 1 such as"),
        (("--prompt", "a", "--tile-size", "0,1,1"), "--tile-size must be three integers >= 1"),
        (("--prompt", "a", "--tile-size", "99,99,99"), "which has 1x1x1 tiles; use a smaller"),
    ):
        outcome = search(*arguments)
        assert outcome.code == 2, arguments
        assert message in outcome.err
        assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize("output", ["pos", "neg", "link", "record"])
def test_tune_writes_over_no_search_and_no_record(output, sglang, tmp_path) -> None:
    files = {
        name: tmp_path / f"mask_search_result_{name}_48x32" / "mask_search_a.json"
        for name in ("pos", "neg")
    }
    for file in files.values():
        file.parent.mkdir()
        file.write_text("{}")
    files["link"] = tmp_path / "strategy.json"
    files["link"].symlink_to(files["neg"])
    files["record"] = tmp_path / "other.json.meta.json"
    files["record"].write_text("{}")
    given = ("--searches", tmp_path, "--output", files[output])
    done = sglang("attention", "sta", "tune", *given)
    assert done.code == 2
    assert done.err.startswith("error: --output must not be a search or the record of a ")
    assert files[output].read_text() == "{}"


def test_tune_reaches_a_target_density(search, sglang, tmp_path) -> None:
    assert search("--prompt", "a fox").code == 0
    strategy = tmp_path / "mask_strategy.json"
    tune = ("attention", "sta", "tune", "--searches", tmp_path / "searches", "--output", strategy)
    outcome = sglang(*tune, "--skip-time-steps", 1, "--target-density", 0.6)
    assert outcome.code == 0, outcome.err
    assert re.search(r", (the least at this|at most .* of it above the least)", outcome.out)
    density = load_strategy(strategy).density(TILES)
    mean = sum(map(sum, density)) / (STEPS * 2)
    assert 0.5 < mean <= 0.6

    outcome = sglang(*tune, "--skip-time-steps", 1, "--target-density", 0.1)
    assert outcome.code == 2
    assert "`target_density` must be at least 0.3704" in outcome.err
    outcome = sglang(*tune)
    assert outcome.code == 2
    assert "`skip_time_steps` must be below the 3 steps of the searches, got 15" in outcome.err


@pytest.mark.slow
def test_a_strategy_for_other_steps_is_refused_unless_retargeted(
    sglang, latents, tiny_pipeline, tmp_path
) -> None:
    path = _strategy(tmp_path / "s.json", TILES, (1, 1, 1))
    config = {"mask_strategy_file_path": str(path), "skip_time_steps": 0}
    model = ("--model-path", tiny_pipeline("wan"), *RUN, "--prompt", "a fox")
    outcome = sglang("generate", *model, "--output-path", tmp_path / "out", *_sta(config))
    assert outcome.code == 2
    assert "it is for 2 steps, the run has 3; give retarget=true to rescale it" in outcome.err
    found, _ = latents("retargeted", *_sta({**config, "retarget": True}))
    assert found.isfinite().all()


@pytest.mark.slow
def test_a_tuned_strategy_is_refused_on_another_grid(
    search, sglang, tiny_pipeline, tmp_path
) -> None:
    assert search("--prompt", "a fox", "--window", "1,1,1").code == 0
    path = tmp_path / "s.json"
    tune = ("attention", "sta", "tune", "--searches", tmp_path / "searches", "--output", path)
    assert sglang(*tune, "--skip-time-steps", 1).code == 0
    config = {"mask_strategy_file_path": str(path), "skip_time_steps": 1}
    model = (
        "--model-path",
        tiny_pipeline("wan"),
        *changed(RUN, ("--width", 192)),
        "--prompt",
        "a fox",
    )
    generate = ("generate", *model, "--output-path", tmp_path / "out")
    outcome = sglang(*generate, *_sta(config))
    assert outcome.code == 2
    found = "it is for 3x2x3 tiles of 1x2x2 tokens, the run has 3x2x6 of 1x2x2; give retarget=true"
    assert found in outcome.err
    assert sglang(*generate, *_sta({**config, "retarget": True})).code == 0


@pytest.mark.parametrize("height", ["inf", [], 0.5, 0])
def test_a_search_of_no_size_is_one_error(height, sglang, tmp_path) -> None:
    folder = tmp_path / "mask_search_result_pos_96x64"
    folder.mkdir()
    losses = {"[1, 1, 1]": [[[0.1]]], "[3, 1, 1]": [[[0.2]]]}
    content = {"search": {"height": height}, "L2_loss": losses, "L1_loss": losses}
    (folder / "mask_search_a.json").write_text(json.dumps(content))
    output = tmp_path / "strategy.json"
    outcome = sglang("attention", "sta", "tune", "--searches", tmp_path, "--output", output)
    assert (outcome.code, outcome.err.count("\n"), output.exists()) == (2, 1, False)
    assert f"must have pixels as search.height, got {height!r}" in outcome.err


def test_show_prints_density_by_step_and_layer(sglang, tmp_path) -> None:
    path = _strategy(tmp_path / "s.json", TILES, TILES, (1, 1, 3), (3, 2, 1))
    outcome = sglang("attention", "sta", "show", path)
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    assert "4 steps x 2 layers x 4 heads on 3x2x3 tiles, density 62.5%" in outcome.out
    assert ["3x2x3", "50.0%", "100.0%"] in lines
    assert ["0-1", "100%", "100%", "100%"] in lines
    assert ["2", "17%", "17%", "17%"] in lines
    assert ["3", "33%", "33%", "33%"] in lines

    outcome = sglang("attention", "sta", "show", path, "--json", "--tiles", "3,2,6")
    document = json.loads(outcome.out)
    assert document["density_by_step_and_layer"][3] == [pytest.approx(1 / 6)] * 2
    assert document["windows"][0] == {"window": [3, 2, 3], "share": 0.5, "density": 0.5}


def test_many_layers_share_columns(sglang, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    strategy = Strategy(windows=((((1, 1, 1),) * 2,) * 60,))
    strategy.write(tmp_path / "s.json")
    outcome = sglang("attention", "sta", "show", tmp_path / "s.json")
    assert "0-4" in outcome.out
    assert all(len(line) <= 100 for line in outcome.out.splitlines()[1:])


def test_show_draws_the_windows(sglang, tmp_path) -> None:
    from PIL import Image

    path = _strategy(tmp_path / "s.json", TILES, (1, 1, 3))
    png = tmp_path / "new" / "windows.png"
    outcome = sglang("attention", "sta", "show", path, "--png", png)
    assert outcome.code == 0, outcome.err
    with Image.open(png) as image:
        assert image.format == "PNG"
        pixels = image.convert("RGB")
        down = [pixels.getpixel((image.width // 2, y)) for y in range(40, 300, 20)]
    assert len({colour for colour in down if len(set(colour)) > 1}) == 2, "one for each window"

    outcome = sglang("attention", "sta", "show", path, "--png", tmp_path / "windows.jpg")
    assert (outcome.code, "--png must end in .png" in outcome.err) == (2, True)
    outcome = sglang("attention", "sta", "show", tmp_path / "absent.json")
    assert outcome.code == 2
    assert "mask strategy must be a readable file" in outcome.err


@pytest.mark.slow_cases("wan")
@pytest.mark.parametrize(
    "name",
    [
        "wan",
        "flux",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("wan22", "hunyuan_video", "qwen_image")
        ),
    ],
)
def test_every_family_runs_sparse_and_full_windows_are_dense(
    name, sglang, tiny_pipeline, tmp_path
) -> None:
    family = FAMILIES[name]
    sizes = [("--height", family.height), ("--width", family.width)]
    sizes += [("--num-frames", family.num_frames)] if family.output == "video" else []
    flags = [text for flag in sizes for text in flag]

    def run(out: str, *arguments: object) -> tuple[torch.Tensor, list[dict]]:
        outcome = sglang(
            *("generate", "--model-path", tiny_pipeline(name), "--prompt", "a fox", "--seed", 0),
            *("--num-inference-steps", 2, "--output-path", tmp_path / out, "--save-latents"),
            *(*flags, *arguments),
        )
        assert outcome.code == 0, outcome.err
        (file,), (record,) = (tmp_path / out).glob("*.safetensors"), (tmp_path / out).glob("*.json")
        layers = json.loads(record.read_text())["attention"]["layers"]
        return load_file(file)["latents"], [
            entry
            for layer in layers
            if layer["component"].startswith("transformer") and layer["role"] == "self"
            for entry in layer["entries"]
        ]

    config = {"tile_size": [2, 2, 2], "skip_time_steps": 0}
    dense, _ = run("dense", "--attention-backend", "torch_sdpa")
    full, _ = run("full", *_sta({**config, "window": [99, 99, 99]}))
    torch.testing.assert_close(full, dense, atol=1e-5, rtol=0)
    sparse, entries = run("sparse", *_sta({**config, "window": [1, 1, 1]}))
    assert sparse.isfinite().all()
    assert (sparse - dense).abs().max() > 1e-4
    assert {entry["backend"] for entry in entries} == {"sliding_tile_attn"}
    ran = [entry for entry in entries if entry["calls"]]
    assert ran
    assert all(0 < d < 1 for entry in ran for d in entry["density_by_step"].values())


def test_a_named_kernel_ends_the_command_where_it_cannot_run(
    sglang, tiny_pipeline, tmp_path
) -> None:
    model = ("--model-path", tiny_pipeline("wan"), *RUN, "--prompt", "a fox")
    out = ("--output-path", tmp_path / "out", "--device", "cpu")
    outcome = sglang("generate", *model, *out, *_sta({"window": [1, 1, 1], "kernel": "gluon"}))
    assert outcome.code == 2
    assert "sliding_tile_attn (settings) with kernel=gluon cannot serve self" in outcome.err
    assert "needs platform cuda, this is cpu" in outcome.err


@pytest.mark.slow
def test_a_run_without_a_step_for_windows_says_so(sglang, tiny_pipeline, tmp_path, caplog) -> None:
    model = ("--model-path", tiny_pipeline("wan"), *RUN, "--prompt", "a fox")
    outcome = sglang(
        *("generate", *model, "--output-path", tmp_path / "out", *_sta({"window": [1, 1, 1]}))
    )
    assert outcome.code == 0, outcome.err
    assert caplog.text.count("skip_time_steps=15 keep all 3 steps of this run dense") == 1


@pytest.mark.slow
def test_generations_that_search_leave_a_file_per_prompt(
    sglang, latents, tmp_path, tiny_pipeline
) -> None:
    folder = tmp_path / "searches"
    config = {"sta_mode": "STA_searching", "search_path": str(folder)}
    for name, seed in (("first", 0), ("second", 1)):
        latents(name, *_sta(config), "--seed", seed)
    (file,) = find_searches(folder)
    assert (file.parent.name, file.name) == ("mask_search_result_pos_96x64", search_name("a fox"))
    assert len(find_searches(folder, NEGATIVE)) == 1
    tune = ("attention", "sta", "tune", "--searches", folder, "--output", tmp_path / "s.json")
    outcome = sglang(*tune, "--skip-time-steps", 1)
    assert (outcome.code, "from 1 searches" in outcome.out) == (0, True)


@pytest.mark.slow
def test_ctrl_c_during_a_search_leaves_only_complete_files(search, monkeypatch, tmp_path) -> None:
    write = SearchFile.write
    written = []

    def write_two(self: SearchFile, path: Path) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(self, path)

    monkeypatch.setattr(SearchFile, "write", write_two)
    outcome = search("--prompt", "a fox", "--prompt", "a cat")
    assert outcome.code == 130
    files = [path for path in (tmp_path / "searches").rglob("*") if path.is_file()]
    assert sorted(files) == sorted(written)
    monkeypatch.undo()
    outcome = search("--prompt", "a fox", "--prompt", "a cat")
    assert outcome.code == 0, outcome.err
    assert "1 of 2 prompts are done already" in outcome.out
    assert len(find_searches(tmp_path / "searches")) == 2
