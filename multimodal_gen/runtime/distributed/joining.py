"""Joining the ranks that a launcher started: one call for scripts that run under torchrun."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed.groups import (
    ParallelGroups,
    build_groups,
    init_world,
    parallel_groups,
    set_parallel_groups,
)
from multimodal_gen.runtime.distributed.mesh import plan_mesh
from multimodal_gen.runtime.platforms import current_platform

__all__ = [
    "check_same",
    "from_first",
    "init_parallel",
    "join_world",
    "leads",
    "ranks_per_host",
]

# Ranks start together, but import and connect at their own speeds.
_START_TIMEOUT_S = 600.0


def init_parallel(
    *,
    num_gpus: int | None = None,
    sp_degree: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    cfg_parallel: bool = False,
    num_heads: int | None = None,
    device_type: str | None = None,
    rank_timeout: float = 300.0,
) -> ParallelGroups:
    """Join the ranks of this run, and split the sequences of layers and pipelines over them.

    Call it once, on every rank, with the same arguments, before `multimodal_gen.apply`; every rank
    then calls the pipeline with the same arguments and the same seed, and gets the same result.
    On CUDA, the GPU of the local rank becomes the current one.

    Args:
        num_gpus: how many ranks there have to be; None takes those that were started.
        sp_degree: ranks that share one sequence; by default all, or half of them with
            `cfg_parallel`.
        ulysses_degree: ranks the heads are split over; by default as many as fit.
        ring_degree: ranks in a ring over keys; by default what the Ulysses degree leaves.
        cfg_parallel: run the two branches of classifier-free guidance on different ranks.
        num_heads: the fewest heads of any layer to be split, which bounds the Ulysses degree; None
            when unknown.
        device_type: "cuda" or "cpu"; by default this machine's accelerator.
        rank_timeout: seconds ranks wait for each other before they fail. The default leaves time
            to load and compile at different speeds.

    Returns:
        The groups of this rank, which are in use from now on; `groups.rank` is its number.

    Raises:
        ConfigError: this process was not started by torchrun and joined no torch.distributed world
            itself; or the degrees do not fit each other, the heads, the ranks or the hosts.
        UsageError: ranks disagree, or there are more of them than GPUs.
    """
    degrees = {
        "num_gpus": num_gpus,
        "sp_degree": sp_degree,
        "ulysses_degree": ulysses_degree,
        "ring_degree": ring_degree,
        "cfg_parallel": cfg_parallel,
        "num_heads": num_heads,
    }
    device_type = device_type or current_platform().device_type
    world_size = join_world(device_type)
    check_same(degrees)
    mesh = plan_mesh(
        world_size=world_size,
        gpus_per_host=ranks_per_host(),
        **degrees,  # type: ignore[arg-type]
    )
    # On an accelerator a stuck exchange is to be found by the ranks' agreement, which says more.
    exchange = rank_timeout * (2 if device_type == "cuda" else 1)
    groups = build_groups(
        mesh,
        timeout=timedelta(seconds=exchange),
        control_timeout=timedelta(seconds=rank_timeout),
    )
    set_parallel_groups(groups)
    return groups


def join_world(device_type: str) -> int:
    """Join the ranks of this run, unless that has been done; return how many there are.

    Args:
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: no launcher started this process, or the device has no exchange.
        UsageError: this host has fewer GPUs than ranks.
    """
    if device_type not in ("cuda", "cpu"):
        raise ConfigError(
            f"device_type must be cuda or cpu where several ranks run, got {device_type!r}"
        )
    if not (dist.is_initialized() or dist.is_torchelastic_launched()):
        raise ConfigError(
            "ranks must be started before they are joined, and none were; start this program "
            "with torchrun, or call torch.distributed.init_process_group first"
        )
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    if device_type == "cuda" and local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"every rank must have a GPU of its own, got local rank {local_rank} on a host with "
            f"{torch.cuda.device_count()} GPUs; start fewer ranks on it"
        )
    return init_world(device_type, timeout=timedelta(seconds=_START_TIMEOUT_S))


def ranks_per_host() -> int | None:
    """Return how many ranks each host has, or None where hosts have different numbers."""
    local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank())
    firsts = [rank for rank, local in enumerate(_gathered(local_rank)) if local == 0]
    ends = [*firsts[1:], dist.get_world_size()]
    sizes = {end - start for start, end in zip(firsts, ends, strict=True)}
    return sizes.pop() if len(sizes) == 1 else None


def check_same(values: Mapping[str, object]) -> None:
    """Check that all ranks of the world were given the same.

    Args:
        values: picklable, by name.

    Raises:
        UsageError: they were not; raised on all of them.
    """
    everyone: list[Mapping[str, object]] = _gathered(dict(values))
    for name in values:
        for rank, given in enumerate(everyone):
            if given.get(name) != everyone[0].get(name):
                raise UsageError(
                    f"{name} must be the same on all ranks, got {everyone[0].get(name)!r} on "
                    f"rank 0 and {given.get(name)!r} on rank {rank}"
                )


def from_first(value: Any) -> Any:
    """Return what rank 0 of the world passed.

    Args:
        value: picklable.
    """
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def leads() -> bool:
    """Tell whether this process writes files, prints and shows progress: alone, or as rank 0."""
    groups = parallel_groups()
    return groups is None or groups.rank == 0


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
