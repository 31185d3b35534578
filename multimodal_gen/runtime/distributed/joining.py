"""Joining the ranks that a launcher started: one call for scripts that run under torchrun."""

import re
from collections.abc import Mapping
from dataclasses import replace
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
    "join_parallel",
    "join_world",
    "leads",
    "leave_parallel",
    "ranks_per_host",
]

# Ranks start together, but import and connect at their own speeds.
_START_TIMEOUT_S = 600.0
# What exchanges can be told to wait, in whole milliseconds, on every backend.
_SHORTEST_S, _LONGEST_S = 1, 1_000_000


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
    On CUDA, the GPU of the local rank becomes the current one. `leave_parallel` ends it.

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
        rank_timeout: seconds ranks wait for each other before they fail, from 1 to 1000000. The
            default leaves time to load and compile at different speeds.

    Returns:
        The groups of this rank, which are in use from now on; `groups.rank` is its number.

    Raises:
        ConfigError: a value is none of those above; this process was not started by torchrun and
            joined no torch.distributed world itself; or the degrees do not fit each other, the
            heads, the ranks or the hosts.
        UsageError: ranks disagree, or there are more of them than GPUs.
    """
    degrees = {
        "num_gpus": num_gpus,
        "sp_degree": sp_degree,
        "ulysses_degree": ulysses_degree,
        "ring_degree": ring_degree,
        "num_heads": num_heads,
    }
    _check_values(degrees, cfg_parallel, rank_timeout)
    device_type = current_platform().device_type if device_type is None else device_type
    creates = not dist.is_initialized()
    join_world(device_type)
    try:
        groups = join_parallel(
            {**degrees, "cfg_parallel": cfg_parallel},
            device_type=device_type,
            rank_timeout=rank_timeout,
        )
    except ConfigError as error:
        raise ConfigError(_as_arguments(str(error))) from None
    groups = replace(groups, owns_world=creates)
    set_parallel_groups(groups)
    return groups


def leave_parallel() -> None:
    """End what `init_parallel` began: layers and pipelines run on one device again.

    Call it on every rank, after the blocks of `multimodal_gen.apply`. A torch.distributed world
    that `init_parallel` joined is left too; one that there was before stays as it is. Without
    groups, or after `torch.distributed.destroy_process_group`, nothing else happens.
    """
    groups = parallel_groups()
    set_parallel_groups(None)
    if groups is not None and groups.owns_world and dist.is_initialized():
        dist.destroy_process_group()


def join_parallel(
    degrees: Mapping[str, Any], *, device_type: str, rank_timeout: float
) -> ParallelGroups:
    """Put the groups of a world that was joined in use, and return them.

    Args:
        degrees: arguments of `init_parallel`, checked one by one.
        device_type: "cuda" or "cpu".
        rank_timeout: seconds ranks wait for each other.

    Raises:
        ConfigError: the degrees do not fit each other, the heads, the ranks or the hosts; told in
            the words of the command line.
        UsageError: ranks disagree.
    """
    check_same(degrees)
    mesh = plan_mesh(world_size=dist.get_world_size(), gpus_per_host=ranks_per_host(), **degrees)
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


def _check_values(degrees: Mapping[str, object], cfg_parallel: object, timeout: object) -> None:
    """Refuse values of a wrong kind on this rank, before it waits for others.

    Raises:
        ConfigError: there is one.
    """
    for name, value in degrees.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"{name} must be None or an integer >= 1, got {value!r}; leave it out to have it "
                f"chosen"
            )
    if not isinstance(cfg_parallel, bool):
        raise ConfigError(f"cfg_parallel must be True or False, got {cfg_parallel!r}")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (number and _SHORTEST_S <= timeout <= _LONGEST_S):  # type: ignore[operator]
        raise ConfigError(
            f"rank_timeout must be a number of seconds from {_SHORTEST_S} to {_LONGEST_S}, got "
            f"{timeout!r}; leave it out for 300"
        )


def _as_arguments(message: str) -> str:
    """Return a message about flags in the words of a caller from Python."""
    message = re.sub(r"--([a-z-]+) (\d+)", r"--\1=\2", message)
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), message)


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
