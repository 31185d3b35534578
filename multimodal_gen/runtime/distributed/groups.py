"""Process groups of a mesh: built once per process, on a torch.distributed world of any launcher.

Data travels on groups of the world's own backend. In addition, ranks that share a sequence have a
gloo group for what they tell each other on the CPU, which never gets between two exchanges of data.
Scripts that run under torchrun make one call, `init_parallel`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.runtime.distributed.mesh import Mesh, Place, plan_mesh
from multimodal_gen.runtime.platforms import current_platform
from multimodal_gen.settings import expect

_TIMEOUT = timedelta(minutes=10)
# Long enough for ranks that compile at different speeds.
_CONTROL_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Ranks that exchange data.

    Attributes:
        ranks: their ranks in the world, in the order of the group.
        index: position of this process among them.
        handle: the process group, or None for a group of one rank.
        size: how many ranks there are.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))


@dataclass(slots=True, kw_only=True, eq=False)
class HandshakeState:
    """What the ranks of a group know of each other's calls; see `handshake.handshake`.

    Attributes:
        agreed: what all sent before calls of a kind.
        pending: messages under way that have not been read.
        num_sent: how many messages this rank has sent.
    """

    agreed: dict[Any, Any] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)
    num_sent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelGroups:
    """The groups of this process.

    Attributes:
        mesh: what they were built from.
        rank: this process in the world.
        ulysses: the ranks heads are split over.
        ring: the ranks keys and values travel round.
        sequence: the ranks that share the sequence, in the order of its shards.
        cfg: the ranks with the same shard of each CFG branch.
        control: the ranks of `sequence`, for messages on the CPU.
        cfg_control: the ranks of `cfg`, for the same.
        head_groups: in how many groups of heads a Ulysses layer exchanges them, at most, so that
            they travel while other groups are computed; None for what was measured to be best.
        owns_world: the world was joined for these groups, and is left with them.
        handshakes: what the ranks of `control` know of each other's calls.
    """

    mesh: Mesh
    rank: int
    ulysses: Group
    ring: Group
    sequence: Group
    cfg: Group
    control: Group
    cfg_control: Group
    head_groups: int | None = None
    owns_world: bool = False
    handshakes: HandshakeState = field(default_factory=HandshakeState)

    @property
    def place(self) -> Place:
        """Where this process sits in the mesh."""
        return self.mesh.place(self.rank)


# What `parallel_groups` returns, for layers, which read it in every call. Process-wide, because the
# ranks of a world are processes: every thread of one is the same rank.
IN_USE: ParallelGroups | None = None


def init_world(
    device_type: str = "cpu",
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta = _TIMEOUT,
) -> int:
    """Join the torch.distributed world of this run, unless that has been done; return its size.

    With "cuda" the GPU of this local rank becomes the current one. Where a launcher tells no local
    rank, that is the GPU with the number of the rank; in a world that there is, on a host that has
    none of that number, the current one stays.

    Under torchrun no argument is needed beyond the device type.

    Args:
        device_type: where data lives; "cuda" takes NCCL for it, everything else gloo.
        init_method: where the ranks meet, for those not started by torchrun.
        rank: this process, with `init_method`.
        world_size: how many there are, with `init_method`.
        timeout: how long an exchange may wait for a rank before it fails.
    """
    joined = dist.is_initialized()
    if not joined:
        # Both: a world may have to move tensors of the CPU too, as offloading and reports do.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
        )
    if device_type == "cuda":
        local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank())
        if not joined or local_rank < torch.cuda.device_count():
            torch.cuda.set_device(local_rank)
    return dist.get_world_size()


def build_groups(
    mesh: Mesh,
    *,
    timeout: timedelta = _TIMEOUT,
    control_timeout: timedelta = _CONTROL_TIMEOUT,
) -> ParallelGroups:
    """Return this process's groups; every rank of the world has to call it, with the same mesh.

    Args:
        mesh: covers the world exactly.
        timeout: how long an exchange of data may wait for a rank.
        control_timeout: how long ranks wait for each other to agree on an exchange.

    Raises:
        ConfigError: there is no world, or one of another size.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "build_groups needs a torch.distributed world, got none; call init_world first"
        )
    if dist.get_world_size() != mesh.world_size:
        raise ConfigError(
            f"the mesh must have the {dist.get_world_size()} ranks of the world, got {mesh}"
        )
    return ParallelGroups(
        mesh=mesh,
        rank=dist.get_rank(),
        ulysses=_join(mesh.ulysses_groups(), timeout),
        ring=_join(mesh.ring_groups(), timeout),
        sequence=_join(mesh.sequence_groups(), timeout),
        cfg=_join(mesh.cfg_groups(), timeout),
        control=_join(mesh.sequence_groups(), control_timeout, backend="gloo"),
        cfg_control=_join(mesh.cfg_groups(), control_timeout, backend="gloo"),
    )


def parallel_groups() -> ParallelGroups | None:
    """Return the groups attention layers exchange data in, or None on one device."""
    return IN_USE


def set_parallel_groups(groups: ParallelGroups | None) -> None:
    """Make attention layers of this process exchange data in `groups`; None ends it."""
    global IN_USE
    IN_USE = groups


@contextmanager
def use_parallel_groups(groups: ParallelGroups | None) -> Iterator[None]:
    """Make layers exchange data in `groups` inside the `with` block, in all threads."""
    before = parallel_groups()
    set_parallel_groups(groups)
    try:
        yield
    finally:
        set_parallel_groups(before)


def _join(
    groups: tuple[tuple[int, ...], ...], timeout: timedelta, *, backend: str | None = None
) -> Group:
    """Create every group, as torch wants it of every rank, and return this process's."""
    rank = dist.get_rank()
    mine = next(ranks for ranks in groups if rank in ranks)
    handle = None
    for ranks in groups if len(mine) > 1 else ():
        options = _options(timeout) if backend is None else None
        made = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
        handle = made if rank in ranks else handle
    return Group(ranks=mine, index=mine.index(rank), handle=handle)


def _options(timeout: timedelta) -> Any:
    """Let exchanges begin while a kernel runs that has more blocks than there is room for.

    Without priority their kernels would wait until its last block has begun.
    """
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


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
    check_same_on_ranks(degrees)
    mesh = plan_mesh(world_size=dist.get_world_size(), gpus_per_host=ranks_per_host(), **degrees)
    # On an accelerator a stuck exchange is to be found by the ranks' handshake, which says more.
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
            f"device_type must be cuda or cpu where several ranks run, got {short(device_type)}"
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


def check_same_on_ranks(values: Mapping[str, object]) -> None:
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


def gathered(mine: Any, group: Group) -> list[Any]:
    """Return what every rank of a group passed, in order.

    Args:
        mine: picklable.
        group: one for messages on the CPU.
    """
    everyone = [mine] * group.size
    if group.handle is not None:
        dist.all_gather_object(everyone, mine, group=group.handle)
    return everyone


def broadcast_object(value: Any) -> Any:
    """Return what rank 0 of the world passed.

    Args:
        value: picklable.
    """
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def is_main_rank() -> bool:
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
                f"{name} must be None or an integer >= 1, got {short(value)}; leave it out to "
                f"have it chosen"
            )
    expect("cfg_parallel", cfg_parallel, bool, "True or False")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (number and _SHORTEST_S <= timeout <= _LONGEST_S):  # type: ignore[operator]
        raise ConfigError(
            f"rank_timeout must be a number of seconds from {_SHORTEST_S} to {_LONGEST_S}, got "
            f"{short(timeout)}; leave it out for 300"
        )


def _as_arguments(message: str) -> str:
    """Return a message about flags in the words of a caller from Python."""
    message = re.sub(r"--([a-z-]+) (\d+)", r"--\1=\2", message)
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), message)


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
