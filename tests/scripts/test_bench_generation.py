"""The benchmark of whole generations: the size of its models, its recipes and its rows."""

import csv
import math
from types import SimpleNamespace

import pytest
import torch

import multimodal_gen
from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.integrations.generator import job_of
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.sampling import check_arguments, check_sizes
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import scope_from_args

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

STAGES = ("prepare_s", "denoise_s", "decode_s", "rest_s", "added_s")

# Billions of parameters that the published checkpoints have, by component.
TEXT_ENCODERS = {"UMT5EncoderModel": 5.68, "T5EncoderModel": 4.76, "LlamaModel": 7.51,
                 "CLIPTextModel": 0.123, "CLIPVisionModel": 0.632}  # fmt: skip
DECODERS = {"wan 2.2 5B 704p 121f": 0.705, "wan 2.1 14B 720p 81f 3 steps": 0.127,
            "hunyuan 720p 129f": 0.246, "flux 1024px": 0.0838}  # fmt: skip
DENOISERS = {"wan 2.2 5B": 5.00, "wan 2.1 14B i2v": 16.4, "wan 2.1 14B 720p": 14.3,
             "wan 2.1 1.3B": 1.42, "hunyuan": 12.8, "flux": 11.9}  # fmt: skip


@pytest.fixture
def script(bench):
    return bench("generation")


@pytest.fixture
def case_of(script):
    return lambda name: next(case for case in script.CASES if case.name.startswith(name))


def rows_in(folder):
    with (folder / "generation.csv").open() as file:
        return list(csv.DictReader(file))


def billions(model):
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


@pytest.mark.parametrize("name", DENOISERS)
def test_denoisers_have_the_size_of_the_published_ones(script, case_of, name):
    found = billions(script.make_empty(case_of(name).components["transformer"]))
    assert found == pytest.approx(DENOISERS[name], rel=0.02)
    assert found == pytest.approx(case_of(name).parameters, rel=0.02)


def test_every_case_has_a_denoiser_whose_size_is_known(script):
    for case in script.CASES:
        assert any(case.name.startswith(name) for name in DENOISERS), case.name


def test_encoders_have_the_size_of_the_published_ones(script):
    parts = {
        part["class"]: part
        for case in script.CASES
        for name, part in case.components.items()
        if "encoder" in name
    }
    assert parts.keys() == TEXT_ENCODERS.keys()
    for name, part in parts.items():
        found = billions(script.make_empty(part))
        assert found == pytest.approx(TEXT_ENCODERS[name], rel=0.02), name


@pytest.mark.parametrize("name", DECODERS)
def test_autoencoders_have_the_size_of_the_published_ones(script, case_of, name):
    found = billions(script.make_empty(case_of(name).components["vae"]))
    assert found == pytest.approx(DECODERS[name], rel=0.02)


@pytest.mark.parametrize("name", DENOISERS)
def test_models_of_true_size_take_their_settings(script, case_of, monkeypatch, tmp_path, name):
    monkeypatch.setattr(script, "fill", lambda model, dtype, device: model)  # without weights
    case = case_of(name)
    settings = script.settings_of(case, script.RECIPES["video_sparse_attn"], case.steps)
    settings |= script.write_folder(case, tmp_path)
    args = job_of({"model_path": str(tmp_path), "prompt": "", "seed": 0, **settings}).args
    index = PipelineIndex.read(args.model_path)
    check_arguments(index, args)
    pipe = script.build(case, index, args, torch.device("cpu"))
    check_sizes(pipe, args)
    with multimodal_gen.apply(pipe, scope=scope_from_args(args)) as handle:
        layers = [layer for layer in handle.report().layers if layer.role is AttentionRole.SELF]
    transformer = case.components["transformer"]
    blocks = transformer.get("num_layers", 19)  # of Flux, as below
    single = transformer.get("num_single_layers", 38 if name == "flux" else 0)
    assert len(layers) == blocks + single


def test_a_smoke_run_writes_both_videos_whose_stages_sum_to_the_total(run_bench, tmp_path):
    options = ("--smoke", "--case", "3 steps", "--only", "^(auto|video_sparse_attn)$")
    result = run_bench("generation", *options, "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    rows = rows_in(tmp_path)
    assert [(row["contender"], row["video"], row["status"]) for row in rows] == [
        (name, video, "ok")
        for name in ("auto", "video_sparse_attn")
        for video in ("first", "second")
    ]
    for row in rows:
        stages = {stage: float(row[stage]) for stage in STAGES}
        assert all(stages[stage] > 0 for stage in ("prepare_s", "denoise_s", "decode_s", "rest_s"))
        assert sum(stages.values()) == pytest.approx(float(row["total_s"]), abs=5e-4)
        assert float(row["median_ms"]) == pytest.approx(1e3 * float(row["total_s"]), abs=0.1)
        assert float(row["s_per_step"]) == pytest.approx(stages["denoise_s"] / 3, abs=1e-4)
        assert (row["steps"], row["steps_run"], row["shortened"]) == ("3", "3", "")
    dense, sparse = rows[1], rows[3]
    assert (float(dense["relative_error"]), dense["density"]) == (0.0, "nan")
    assert math.isnan(float(sparse["relative_error"]))
    assert 0 < float(sparse["density"]) < 1


@pytest.mark.slow
@pytest.mark.parametrize("index", range(5))
def test_every_recipe_that_runs_here_runs_on_every_tiny_model(script, run_bench, tmp_path, index):
    case = script.SMOKE[index]
    result = run_bench("generation", "--smoke", "--case", f"^{case.name}$", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    rows = rows_in(tmp_path)
    assert {row["status"] for row in rows} == {"ok"}
    left_out = {  # what needs a GPU, as 8 bits do
        name
        for name, recipe in script.RECIPES.items()
        if "cuda" in recipe.get("needs", ()) or "quantize" in recipe
    }
    if case.steps < 5:
        left_out.add("video_sparse_attn, cache")
    assert {row["contender"] for row in rows} == script.RECIPES.keys() - left_out
    assert result.out.count("left out: ") == len(left_out)


def test_graphs_are_combined_with_what_they_serve(script):
    found = [recipe for recipe in script.RECIPES.values() if recipe.get("cuda_graph")]
    assert any({"attention_backend_config", "quantize"} <= recipe.keys() for recipe in found)
    assert not any("cache" in recipe for recipe in found), "which decides in every step"


def test_every_pipeline_has_a_tiny_model(script):
    assert {case.pipeline for case in script.SMOKE} == {case.pipeline for case in script.CASES}
    assert len(script.SMOKE) == 5


def test_what_is_quantised_is_the_denoiser(script, bench_of, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(script, "check_quantized", lambda index, ways, device: None)
    monkeypatch.setattr(
        script, "quantization_config", lambda *way: SimpleNamespace(quant_type=way[1])
    )
    monkeypatch.setattr(
        script, "quantise", lambda model, way: asked.append((type(model).__name__, way))
    )
    bench = bench_of("generation", only="^video_sparse_attn, fp8$", steps=None)
    script.measure(next(case for case in script.SMOKE if case.steps == 3), bench)
    assert asked == [("WanTransformer3DModel", "torchao-fp8-dynamic")]
    assert [row["status"] for row in rows_in(tmp_path)] == ["ok", "ok"]
    assert bench.wrong == []


def test_what_this_machine_cannot_run_is_left_out(script, bench_of, tmp_path, capsys):
    bench = bench_of("generation", only="^(stock _flash_3|sage_attn)", steps=None)
    script.measure(script.SMOKE[-1], bench)
    said = capsys.readouterr().out
    assert "left out: stock _flash_3, compiled, there is no cuda" in said
    assert "left out: sage_attn, there is no cuda" in said
    assert (bench.wrong, list(tmp_path.iterdir())) == ([], [])


def test_a_wrong_recipe_is_a_failed_row(script, run_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "relative_error", lambda found, expected: 0.06)
    options = ("--smoke", "--case", "3 steps", "--only", "^auto$", "--out", tmp_path)
    result = run_bench("generation", *options)
    assert result.code == 1
    assert "wrong: smoke wan 2.1 14B 720p 81f 3 steps: auto" in result.err
    for row in rows_in(tmp_path):
        assert row["status"] == "failed: RuntimeError: relative error 6.00e-02, above 0.05"
        assert math.isnan(float(row["total_s"]))


def test_latents_may_be_off_by_more_with_two_branches_of_guidance(case_of):
    assert case_of("flux").bound == 0.05  # a guidance of 3.5 that the denoiser embeds
    assert case_of("wan 2.1 1.3B").bound == 0.05
    assert case_of("wan 2.2 5B").bound == pytest.approx(9 * 0.05)


def report(*backends, role=AttentionRole.SELF):
    """Return what was made by a layer that ran on (backend, density, calls)."""
    entries = [
        SimpleNamespace(selection=SimpleNamespace(backend=name), density=density, calls=calls)
        for name, density, calls in backends
    ]
    layer = SimpleNamespace(name="blocks.0.attn1", role=role, entries=entries, detours=())
    return SimpleNamespace(report=SimpleNamespace(layers=[layer]))


def test_the_density_counts_dense_steps(script):
    made = report(("torch_sdpa", None, 1), ("video_sparse_attn", 0.1, 4))
    assert script.density_of("video_sparse_attn", made) == pytest.approx((1 + 0.4) / 5)
    assert math.isnan(script.density_of(None, made))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (report(("torch_sdpa", None, 5)), r"attn1 must run sage_attn, ran \['torch_sdpa'\]"),
        (report(("sage_attn", None, 5), role=AttentionRole.CROSS), "of which there is none"),
    ],
    ids=["another", "no self-attention"],
)
def test_the_backend_that_was_asked_for_must_have_run(script, made, message):
    with pytest.raises(RuntimeError, match=message):
        script.density_of("sage_attn", made)


@pytest.mark.parametrize(
    ("steps", "dense", "cached"),
    [(50, "0-9", "before_step=10,"), (10, "0-1", "before_step=2,"), (3, None, None)],
)
def test_the_first_fifth_of_the_steps_is_dense_and_not_cached(
    script, case_of, steps, dense, cached
):
    case = case_of("hunyuan")
    recipe = script.RECIPES["video_sparse_attn, cache"]
    found = script.settings_of(case, recipe, steps)
    if cached is None:
        assert found is None
        found = script.settings_of(case, script.RECIPES["video_sparse_attn"], steps)
    else:
        assert cached in found["cache"]
    config = found["attention_backend_config"]
    assert (config["sparsity"], config.get("dense_steps")) == (0.9, dense)
    assert (found["num_inference_steps"], found["height"]) == (steps, 720)
    assert "{last}" in recipe["attention_backend_config"]["dense_steps"], "it was changed"


def test_steps_that_were_not_run_are_added_as_the_second_video_had_them(
    script, bench_of, case_of, tmp_path
):
    case = case_of("wan 2.1 14B i2v")
    times = dict(zip(script.STAGES, (1.0, 20.0, 3.0, 0.5), strict=True))
    rest = dict.fromkeys(script.FAILED.keys() - times.keys(), math.nan)
    rows = {
        "first": {**rest, **times, "denoise_s": 60.0, "s_per_step": 6.0},
        "second": {**rest, **times, "s_per_step": 2.0},
    }
    script.write(case, "auto", 10, rows, "ok", bench_of("generation"))
    first, second = rows_in(tmp_path)
    assert (first["added_s"], second["added_s"]) == ("60.0", "60.0")  # 30 steps
    assert (first["total_s"], second["total_s"]) == ("124.5", "84.5")
    assert second["shortened"] == "10 of 40 steps were run"
    assert (second["steps"], second["steps_run"]) == ("40", "10")
    assert "LightX2V 5.18, sglang 6.13" in second["published"]
    assert (second["published_of"], second["published_gpu"]) == ("s_per_step", "NVIDIA H100")


def test_published_figures_are_of_a_column_and_have_a_source(script):
    told = [case.published for case in script.CASES if case.published]
    assert len(told) == 4
    for each in told:
        assert each["of"] in ("total_s", "denoise_s", "s_per_step")
        assert each["gpu"] in ("NVIDIA H100", "NVIDIA H200")
        assert each["source"].startswith("https://")
        assert all(value > 0 for value in each["figures"].values())


def test_models_of_true_size_need_a_gpu(run_bench, tmp_path):
    result = run_bench("generation", "--case", "flux", "--out", tmp_path)
    assert result.code == 2
    assert "error: models of true size need a GPU; try --smoke" in result.err
    assert list(tmp_path.iterdir()) == []


def test_weights_have_the_dtypes_of_a_loaded_model_and_stay_tied(script):
    part = script.SMOKE[0].components["transformer"]
    with torch.random.fork_rng(devices=[]):
        model = script.fill(script.make_empty(part), torch.bfloat16, torch.device("cpu"))
        assert model.blocks[0].attn1.to_q.weight.dtype is torch.bfloat16
        assert model.condition_embedder.time_embedder.linear_1.weight.dtype is torch.float32
        assert model.blocks[0].attn1.to_q.weight.float().std().item() == pytest.approx(
            0.02, rel=0.1
        )
        tied = torch.nn.ModuleList([torch.nn.Linear(4, 4, device="meta") for _ in range(2)])
        tied[1].weight = tied[0].weight
        filled = script.fill(tied, torch.bfloat16, torch.device("cpu"))
    assert filled[0].weight is filled[1].weight


def test_what_cannot_be_quantised_here_is_left_out(script, monkeypatch):
    def refuse(*_):
        raise script.UsageError("needs a GPU")

    monkeypatch.setattr(script, "check_quantized", refuse)
    args = SimpleNamespace(quantize=None)
    with pytest.raises(UnsupportedBackendError, match="needs a GPU"):
        script.build(script.SMOKE[0], None, args, torch.device("cpu"))
