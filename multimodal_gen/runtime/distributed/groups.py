"""Process groups of a mesh: built once per process, on a torch.distributed world of any launcher.

Data travels on groups of the world's own backend. Beside them, ranks that share a sequence have a
gloo group for what they tell each other on the CPU, which never gets between two exchanges of data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.distributed.mesh import Mesh, Place

__all__ = [
    "Agreements",
    "Group",
    "ParallelGroups",
    "build_groups",
    "init_world",
    "parallel_groups",
    "set_parallel_groups",
    "use_parallel_groups",
]

_TIMEOUT = timedelta(minutes=10)
# Long enough for ranks that compile at different speeds.
_CONTROL_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Ranks that exchange data.

    Attributes:
        ranks: their ranks in the world, in the order of the group.
        index: position of this process among them.
        handle: the process group, or None where there is nobody to exchange with.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


@dataclass(slots=True, kw_only=True, eq=False)
class Agreements:
    """What a rank knows of what others tell it; see `agreement.agree`.

    Attributes:
        known: what all said in calls of a kind.
        pending: messages under way that nobody has looked at.
        told: how many messages this rank has sent.
    """

    known: dict[Any, Any] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)
    told: int = 0


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
        head_chunks: in how many chunks of heads a Ulysses layer exchanges them, at most, so that
            they travel while other chunks are computed; None for what was measured to be best.
        owns_world: the world was joined for these groups, and is left with them.
        agreements: what the ranks of `control` have told each other.
    """

    mesh: Mesh
    rank: int
    ulysses: Group
    ring: Group
    sequence: Group
    cfg: Group
    control: Group
    cfg_control: Group
    head_chunks: int | None = None
    owns_world: bool = False
    agreements: Agreements = field(default_factory=Agreements)

    @property
    def place(self) -> Place:
        """Where this process sits in the mesh."""
        return self.mesh.place(self.rank)


# Process-wide, because the ranks of a world are processes: every thread of one is the same rank.
_GROUPS: ParallelGroups | None = None


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
    head_chunks: int | None = None,
) -> ParallelGroups:
    """Return this process's groups; every rank of the world has to call it, with the same mesh.

    Args:
        mesh: covers the world exactly.
        timeout: how long an exchange of data may wait for a rank.
        control_timeout: how long ranks wait for each other to agree on an exchange.
        head_chunks: in how many chunks of heads a Ulysses layer exchanges them, at most; None for
            what was measured to be best.

    Raises:
        ConfigError: there is no world, or one of another size, or `head_chunks` is none.
    """
    if head_chunks is not None and (type(head_chunks) is not int or head_chunks < 1):
        raise ConfigError(f"head_chunks must be None or an integer >= 1, got {head_chunks!r}")
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
        head_chunks=head_chunks,
    )


def parallel_groups() -> ParallelGroups | None:
    """Return the groups attention layers exchange data in, or None on one device."""
    return _GROUPS


def set_parallel_groups(groups: ParallelGroups | None) -> None:
    """Make attention layers of this process exchange data in `groups`; None ends it."""
    global _GROUPS
    _GROUPS = groups


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
