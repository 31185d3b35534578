"""Which rank does what: the mesh of CFG branches, rings and Ulysses groups, as pure arithmetic.

Ranks are numbered with the Ulysses coordinate fastest, then the ring, then the CFG branch:

    rank = (cfg * ring_degree + ring) * ulysses_degree + ulysses

so that a Ulysses group, which exchanges most, is a run of neighbouring ranks, a ring takes every
`ulysses_degree`-th rank, and the ranks that share one sequence hold its shards in rank order.
Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from multimodal_gen.errors import ConfigError, short


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank sits in a mesh.

    Attributes:
        cfg: CFG branch.
        ring: position in its ring.
        ulysses: position in its Ulysses group.
    """

    cfg: int
    ring: int
    ulysses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The sizes of the three dimensions.

    Attributes:
        cfg: CFG branches that run side by side, 1 or 2.
        ulysses: ranks that the heads of a layer are split over.
        ring: ranks that keys and values travel round.

    Raises:
        ConfigError: a size is no positive integer, or there are more than two CFG branches.
    """

    cfg: int = 1
    ulysses: int = 1
    ring: int = 1

    def __post_init__(self) -> None:
        for name, size in (("cfg", self.cfg), ("ulysses", self.ulysses), ("ring", self.ring)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {short(size)}")
        if self.cfg > 2:
            raise ConfigError(f"cfg must be 1 or 2, the branches there are, got {self.cfg}")

    @property
    def sequence(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses * self.ring

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.cfg * self.sequence

    def place(self, rank: int) -> Place:
        """Return the coordinates of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank must be in [0, {self.world_size - 1}], got {rank}")
        rest, ulysses = divmod(rank, self.ulysses)
        cfg, ring = divmod(rest, self.ring)
        return Place(cfg=cfg, ring=ring, ulysses=ulysses)

    def ulysses_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every Ulysses group: runs of neighbours."""
        return self._groups(self.ulysses)

    def ring_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ring: a stride of `ulysses` within one sequence."""
        return self._groups(self.ring, stride=self.ulysses)

    def sequence_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that share a sequence, in the order of its shards."""
        return self._groups(self.sequence)

    def cfg_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that hold the same shard of the different CFG branches."""
        return self._groups(self.cfg, stride=self.sequence)

    def _groups(self, size: int, stride: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return all ranks in groups of so many that lie so far apart."""
        return tuple(
            tuple(range(start + offset, start + size * stride, stride))
            for start in range(0, self.world_size, size * stride)
            for offset in range(stride)
        )

    def __str__(self) -> str:
        return (
            f"{self.cfg} CFG x {self.ring} ring x {self.ulysses} Ulysses = {self.world_size} GPUs"
        )


def plan_mesh(
    *,
    num_gpus: int | None = None,
    sp_degree: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    cfg_parallel: bool = False,
    num_heads: int | None = None,
    world_size: int | None = None,
    gpus_per_host: int | None = None,
) -> Mesh:
    """Return the mesh that flags ask for; what they leave open follows from the rest.

    Without degrees the Ulysses degree is the largest that has a head for every rank and keeps its
    groups on one host; rings take what remains. Heads need not divide evenly.

    Args:
        num_gpus: GPUs of the whole run, on all hosts; None takes `world_size`, or what the degrees
            multiply to.
        sp_degree: GPUs that share one sequence.
        ulysses_degree: GPUs the heads are split over.
        ring_degree: GPUs in a ring.
        cfg_parallel: give the two CFG branches to different GPUs.
        num_heads: the fewest query heads that any layer to be split has, or None when unknown.
        world_size: ranks of the run to join, or None when the ranks are yet to be started.
        gpus_per_host: GPUs (or local ranks) of each host, or None when unknown. Where no run is to
            be joined, all GPUs have to be on this one.

    Raises:
        ConfigError: the numbers do not fit each other, the heads, the GPUs or the hosts. The
            message shows the arithmetic and the nearest choice that works.
    """
    given = {
        "--num-gpus": num_gpus,
        "--sp-degree": sp_degree,
        "--ulysses-degree": ulysses_degree,
        "--ring-degree": ring_degree,
    }
    for flag, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{flag} must be an integer >= 1, got {short(value)}")
    cfg = 2 if cfg_parallel else 1
    limits = _Limits(
        cfg=cfg,
        num_heads=num_heads,
        gpus_per_host=gpus_per_host,
        may_resize=num_gpus is not None and world_size is None and sp_degree is None,
    )
    total = _total(num_gpus, world_size, cfg, sp_degree, ulysses_degree, ring_degree)
    if world_size is None and gpus_per_host is not None and total > gpus_per_host:
        raise ConfigError(
            f"--num-gpus must be at most {gpus_per_host}, the GPUs of this host, got {total}; use "
            f"--num-gpus {gpus_per_host}, or start ranks on several hosts with torchrun"
        )
    if total % cfg:
        raise ConfigError(
            f"--num-gpus must be even with --cfg-parallel, which halves them, got {total}; use "
            f"--num-gpus {total + 1 if total == 1 else total - 1}"
        )
    sequence = total // cfg
    wanted = (ulysses_degree, ring_degree)
    if sp_degree is not None and sp_degree != sequence:
        raise ConfigError(
            f"--sp-degree must be {_quotient(total, cfg)}, got {sp_degree}; "
            f"use --sp-degree {sequence}"
        )
    if None not in wanted and wanted[0] * wanted[1] != sequence:  # type: ignore[operator]
        raise ConfigError(
            f"--ulysses-degree x --ring-degree must be {_quotient(total, cfg)}, got {wanted[0]} x "
            f"{wanted[1]} = {wanted[0] * wanted[1]}; "  # type: ignore[operator]
            f"{limits.nearest(sequence, wanted)}"
        )
    for flag, degree in (("--ulysses-degree", ulysses_degree), ("--ring-degree", ring_degree)):
        if degree is not None and sequence % degree:
            raise ConfigError(
                f"{flag} must divide {_quotient(total, cfg)}, got {degree}; "
                f"{limits.nearest(sequence, wanted)}"
            )
    return Mesh(cfg=cfg, **limits.choose(sequence, wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    cfg: int
    num_heads: int | None
    gpus_per_host: int | None
    may_resize: bool

    def problem(self, ulysses: int) -> str | None:
        """Return which rule a Ulysses degree breaks, or None."""
        if self.num_heads is not None and ulysses > self.num_heads:
            return (
                f"must be at most {self.num_heads}, the heads of a layer, so that every GPU has one"
            )
        host = self.gpus_per_host
        if host is not None and host % ulysses and ulysses % host:
            return (
                f"must divide the {host} GPUs of a host or be a multiple of them, so that groups "
                f"do not straddle hosts"
            )
        return None

    def splits(self, sequence: int) -> Iterator[tuple[int, int]]:
        """Yield the (ulysses, ring) pairs that work, the largest Ulysses degree first."""
        for ulysses in range(sequence, 0, -1):
            if sequence % ulysses == 0 and self.problem(ulysses) is None:
                yield ulysses, sequence // ulysses

    def nearest(self, sequence: int, wanted: tuple[int | None, int | None]) -> str:
        """Return the advice to take the pair closest to what was wanted."""

        def distance(split: tuple[int, int]) -> float:
            pairs = [pair for pair in zip(split, wanted, strict=True) if pair[1] is not None]
            return sum(max(have / want, want / have) for have, want in pairs if want)

        ulysses, ring = min(self.splits(sequence), key=distance)
        return (
            f"use --ulysses-degree {ulysses} --ring-degree {ring}{self.resized(sequence, wanted)}"
        )

    def resized(self, sequence: int, wanted: tuple[int | None, int | None]) -> str:
        """Return the advice to take as many GPUs as the degrees wanted need, where that works."""
        ulysses, ring = wanted[0] or 1, wanted[1] or 1
        ulysses = min(ulysses, self.num_heads or ulysses)
        total = self.cfg * ulysses * ring
        fits = self.gpus_per_host is None or total <= self.gpus_per_host
        if not self.may_resize or not fits or ulysses * ring == sequence or self.problem(ulysses):
            return ""
        return f", or --num-gpus {total} --ulysses-degree {ulysses} --ring-degree {ring}"

    def choose(self, sequence: int, wanted: tuple[int | None, int | None]) -> dict[str, int]:
        """Return the split wanted, its open part filled in.

        Raises:
            ConfigError: it breaks a rule.
        """
        ulysses, ring = wanted
        if ulysses is None and ring is None:
            splits = list(self.splits(sequence))
            host = self.gpus_per_host or sequence
            ulysses, ring = next((s for s in splits if s[0] <= host), splits[0])
        ulysses = sequence // (ring or 1) if ulysses is None else ulysses
        problem = self.problem(ulysses)
        if problem is not None:
            arithmetic = f" ({sequence} / ring {ring})" if wanted[0] is None else ""
            raise ConfigError(
                f"--ulysses-degree {problem}, got {ulysses}{arithmetic}; "
                f"{self.nearest(sequence, (ulysses, ring))}"
            )
        return {"ulysses": ulysses, "ring": sequence // ulysses}


def _total(
    num_gpus: int | None,
    world_size: int | None,
    cfg: int,
    sp_degree: int | None,
    ulysses_degree: int | None,
    ring_degree: int | None,
) -> int:
    if world_size is not None:
        if num_gpus not in (None, world_size):
            raise ConfigError(
                f"--num-gpus must be the {world_size} ranks that were started, got {num_gpus}; "
                f"use --num-gpus {world_size} or leave it out"
            )
        return world_size
    if num_gpus is not None:
        return num_gpus
    if sp_degree is not None:
        return cfg * sp_degree
    return cfg * (ulysses_degree or 1) * (ring_degree or 1)


def _quotient(total: int, cfg: int) -> str:
    if cfg == 1:
        return f"{total}, the GPUs there are"
    return f"{total // cfg} ({total} GPUs / {cfg} CFG branches)"
