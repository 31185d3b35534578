"""What is settled before ranks start, on machines with and without GPUs."""

import json
import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator import ranks
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.ranks import (
    check_guided,
    ending_signals_raise,
    join_ranks,
    plan_ranks,
    rank_device,
)
from multimodal_gen.runtime.server_args import ServerArgs


@pytest.fixture
def asked(tiny_pipeline):
    """Return the arguments of a run of the tiny Wan, whose layers have four heads."""

    def make(**given) -> ServerArgs:
        return ServerArgs(model_path=str(tiny_pipeline("wan")), prompt="a", **given)

    return make


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(ranks, "current_platform", lambda: SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("given", "mesh"),
    [
        ({"num_gpus": 1, "ulysses_degree": 1}, Mesh()),
        ({"num_gpus": 8}, Mesh(ulysses=4, ring=2)),
        ({"ulysses_degree": 2, "ring_degree": 2}, Mesh(ulysses=2, ring=2)),
        ({"cfg_parallel": True}, Mesh(cfg=2)),
        ({"num_gpus": 4, "cfg_parallel": True, "ring_degree": 2}, Mesh(cfg=2, ring=2)),
    ],
    ids=str,
)
def test_flags_become_a_mesh_that_fits_the_heads(given, mesh, asked) -> None:
    assert plan_ranks(asked(device="cpu", **given)) == mesh


def test_one_gpu_needs_no_look_at_the_model() -> None:
    assert plan_ranks(ServerArgs(model_path="nowhere", prompt="a")) == Mesh()


def test_the_gpus_of_this_host_are_the_limit(asked, two_gpus) -> None:
    assert plan_ranks(asked(num_gpus=2)) == Mesh(ulysses=2)
    message = "--num-gpus must be at most 2, the GPUs of this host, got 4; use --num-gpus 2, or"
    with pytest.raises(ConfigError, match=message):
        plan_ranks(asked(num_gpus=4))


def test_a_device_that_ranks_cannot_share_is_refused(asked, two_gpus) -> None:
    with pytest.raises(UsageError, match=r"must name no single device .*, got 'cuda:1'; use"):
        plan_ranks(asked(num_gpus=2, device="cuda:1"))


def test_a_platform_without_an_exchange_is_refused(asked, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "current_platform", lambda: SimpleNamespace(device_type="mps"))
    with pytest.raises(UsageError, match=r"must be cuda or cpu where several ranks run, got mps"):
        plan_ranks(asked(num_gpus=2))


def test_a_single_rank_of_torchrun_runs_as_one_process_does() -> None:
    args = ServerArgs(model_path="nowhere", prompt="a", backend="diffusers")
    assert join_ranks([args], 1) == (args,)
    with pytest.raises(ConfigError, match="--num-gpus must be the 1 ranks that were started, got"):
        join_ranks([replace(args, num_gpus=2)], 1)


def test_every_rank_has_the_gpu_that_is_its_current_one(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert rank_device("cuda") == torch.device("cuda")
    with use_parallel_groups(SimpleNamespace(rank=3)):
        assert rank_device("cuda") == torch.device("cuda", 3)
        assert rank_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signals_that_end_a_rank_let_it_clean_up(number) -> None:
    before = signal.getsignal(number)
    with (
        use_parallel_groups(SimpleNamespace(rank=0)),
        pytest.raises(SystemExit, match=str(128 + number)),
        ending_signals_raise(),
    ):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_process_on_its_own_keeps_its_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_signals_raise():
        assert signal.getsignal(signal.SIGTERM) is before


NEGATIVE = {"negative_prompt": "blurry"}


def check(folder, **given):
    """Check a generation by the files alone that describe the pipeline."""
    args = ServerArgs(model_path=str(folder), prompt="a", cfg_parallel=True, **given)
    check_guided(PipelineIndex.read(args.model_path), args)


@pytest.mark.parametrize(
    ("family", "given", "got"),
    [
        ("flux", {}, "a true_cfg_scale of 1 and no negative prompt; give --true-cfg-scale above 1"),
        ("flux", {"true_cfg_scale": 4.0}, "no negative prompt; give --true-cfg-scale above 1 and"),
        ("flux", {"guidance_scale": 1.0, **NEGATIVE}, "a true_cfg_scale of 1; give"),
        ("hunyuan_video", NEGATIVE, "a true_cfg_scale of 1; give"),
        ("qwen_image", {}, "no negative prompt; give --true-cfg-scale above 1 and --negative-pro"),
        ("wan", {"guidance_scale": 1.0}, "a guidance scale of 1; give --guidance-scale above 1"),
        ("cogvideox", {"guidance_scale": 0.5}, "a guidance scale of 0.5; give"),
        ("ltx", {"guidance_scale": 1.0}, "a guidance scale of 1; give"),
        ("hunyuan_video_15", {"guidance_scale": 1.0}, "a guidance scale of 1; give"),
    ],
    ids=str,
)
def test_a_generation_with_one_branch_is_refused(tiny_pipeline, family, given, got):
    message = f"Pipeline must use classifier-free guidance under --cfg-parallel, .* got {got}"
    with pytest.raises(UsageError, match=message):
        check(tiny_pipeline(family), **given)


def test_a_pipeline_saved_as_distilled_is_refused_at_any_scale(tiny_pipeline, tmp_path):
    folder = shutil.copytree(tiny_pipeline("flux2_klein"), tmp_path / "distilled")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    with pytest.raises(UsageError, match="its denoiser was distilled to have one branch; drop"):
        check(folder, guidance_scale=4.0)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("wan", {}),
        ("ltx", {}),
        ("hunyuan_video_15", {}),
        ("qwen_image", NEGATIVE),
        ("flux", {"true_cfg_scale": 4.0, **NEGATIVE}),
        ("hunyuan_video", {"true_cfg_scale": 2.0, **NEGATIVE}),
    ],
    ids=str,
)
def test_a_generation_with_two_branches_passes(tiny_pipeline, family, given):
    assert check(tiny_pipeline(family), **given) is None


@pytest.mark.parametrize("embeds", [False, True])
def test_the_guidance_scale_counts_where_the_denoiser_does_not_take_it(
    tiny_pipeline, tmp_path, embeds
):
    folder = tmp_path / "flux"
    shutil.copytree(tiny_pipeline("flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": embeds}))
    if not embeds:
        assert check(folder, guidance_scale=3.0, **NEGATIVE) is None
        return
    with pytest.raises(UsageError, match="got a true_cfg_scale of 1; give --true-cfg-scale above"):
        check(folder, guidance_scale=3.0, **NEGATIVE)


def test_a_pipeline_that_never_has_two_branches_is_refused_whatever_is_given(
    tiny_pipeline, tmp_path
):
    folder = tmp_path / "flux"
    shutil.copytree(tiny_pipeline("flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", "FluxFillPipeline"))
    message = "FluxFillPipeline must not run under --cfg-parallel, .* one branch; drop --cfg-par"
    with pytest.raises(UsageError, match=message):
        check(folder, guidance_scale=3.0, **NEGATIVE)
