"""What is settled before ranks start, on machines with and without GPUs."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator import ranks
from multimodal_gen.runtime.generator.ranks import (
    ending_signals_raise,
    join_ranks,
    plan_ranks,
    rank_device,
)
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_flag


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


@pytest.mark.parametrize("name", ["cuda_graph", "compile_ahead"])
def test_graphs_of_whole_calls_and_compiling_ahead_are_of_one_gpu(name, asked, two_gpus) -> None:
    message = f"{as_flag(name)} must be left out on several GPUs"
    with pytest.raises(UsageError, match=message):
        plan_ranks(asked(num_gpus=2, **{name: True}))
