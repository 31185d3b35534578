"""What benchmarks over several GPUs share: layouts, timing ranks agree on, rows written by one."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _harness import (
    DEVICE,
    Bench,
    Row,
    Times,
    event_ms,
    relative_error,
    shuffled_rounds,
    synchronize,
)

from multimodal_gen.runtime.distributed.groups import (
    ParallelGroups,
    build_groups,
    init_world,
    parallel_groups,
    use_parallel_groups,
)
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.distributed.timing import TimeTaken

ONE = Mesh()


class Reported(Protocol):
    """A layer, or a model that `apply` was called on."""

    def report(self) -> Any:
        """Return what ran, and the times so far."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to run a case.

    Attributes:
        name: its name in the rows.
        run: what is timed; its output is compared with that of the first contender, if it has one.
        mesh: how GPUs share the sequence; those left over do the same.
        one_gpu: the contender that does the same on one GPU, or "".
        chunks: chunks of heads that Ulysses exchanges them in.
        sent: bytes each GPU sends.
        around: entered around every run, outside of the timed region; gives what has a report.
        check: checks the report of the first run.
        split: whether the output is that of this rank's tokens.
    """

    name: str
    run: Callable[[], object]
    mesh: Mesh = ONE
    one_gpu: str = ""
    chunks: int = 1
    sent: float = 0.0
    around: Callable[[], AbstractContextManager[Reported | None]] = nullcontext
    check: Callable[[Any], None] | None = None
    split: bool = False


@dataclass
class Ranks:
    """This process among those of a benchmark."""

    rank: int
    size: int
    failures: list[str] = field(default_factory=list)
    _groups: dict[Mesh, ParallelGroups] = field(default_factory=dict)

    @classmethod
    def join(cls) -> "Ranks":
        """Join the world that torchrun made."""
        size = init_world(DEVICE)
        return cls(rank=dist.get_rank(), size=size)

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def fail(self, text: str) -> None:
        """Print what went wrong and remember it."""
        self.say(f"FAILED: {text}")
        self.failures.append(text)

    def meshes(self) -> dict[str, Mesh]:
        """Return the layouts that fill all GPUs, by name."""
        n = self.size
        found = {f"ulysses {n}": Mesh(ulysses=n), f"ring {n}": Mesh(ring=n)}
        if n % 2 == 0 and n > 2:
            found[f"ulysses {n // 2} ring 2"] = Mesh(ulysses=n // 2, ring=2)
        return found

    @contextmanager
    def sharing(self, mesh: Mesh, chunks: int = 1) -> Iterator[None]:
        """Let layers share a sequence as `mesh` says, alike in as many copies as there is room."""
        if mesh == ONE:
            with use_parallel_groups(None):
                yield
            return
        whole = replace(mesh, cfg=self.size // mesh.sequence)
        if whole not in self._groups:
            self._groups[whole] = build_groups(whole)
        with use_parallel_groups(replace(self._groups[whole], head_groups=chunks)):
            yield

    def worst(self, value: float) -> float:
        """Return the largest `value` of all ranks."""
        told = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told)

    def check(self, contenders: list[Contender], bound: float) -> dict[str, float]:
        """Return the errors of outputs on the worst rank, against the first contender's on one GPU.

        This warms up, too. Contenders that fail or are wrong are left out, and the run fails at its
        end.
        """
        expected: torch.Tensor | None = None
        errors = {}
        for c in list(contenders):
            with self.sharing(c.mesh, c.chunks), c.around() as reported:
                try:
                    out = c.run()
                    if c.check is not None and reported is not None:
                        c.check(reported.report())
                except (RuntimeError, ValueError) as error:  # the rest is worth having without it
                    self.fail(f"{c.name}: {error}")
                    contenders.remove(c)
                    continue
                if not isinstance(out, torch.Tensor):
                    continue
                expected = out if expected is None else expected
                wanted = own_tokens(expected) if c.split else expected
                errors[c.name] = self.worst(relative_error(out, wanted))
            self.say(f"{c.name} has relative error {errors[c.name]:.2e}")
            if not errors[c.name] < bound:
                self.fail(f"{c.name} is wrong, relative error {errors[c.name]:.2e}")
                contenders.remove(c)
        return errors

    def measure(
        self,
        bench: Bench,
        contenders: list[Contender],
        *,
        bound: float,
        rounds: int,
        block_ms: float = 0.0,
        **of_all: Any,
    ) -> None:
        """Check and time contenders, and append their rows; `of_all` as `rows_of` takes it."""
        errors = self.check(contenders, bound)
        times, taken = self._time(contenders, rounds=rounds, block_ms=block_ms)
        if self.rank == 0:
            self._write(bench, contenders, times, taken, {**of_all, "errors": errors})

    def _time(
        self, contenders: Sequence[Contender], *, rounds: int, block_ms: float
    ) -> tuple[Times, dict[str, list[TimeTaken]]]:
        """Time every contender once per round, ranks starting together; each has run before.

        Returns:
            Milliseconds per run of the slowest rank, and what the first rank's report says.
        """
        times: Times = {c.name: [] for c in contenders}
        taken: dict[str, list[TimeTaken]] = {c.name: [] for c in contenders}
        by_name = {c.name: c for c in contenders}
        repeats = dict.fromkeys(by_name, 1)
        if block_ms:
            for c in contenders:
                repeats[c.name] = max(1, math.ceil(block_ms / self._once(c, 1)[0]))
        for name in shuffled_rounds(by_name, rounds):
            spent, told = self._once(by_name[name], repeats[name])
            if not block_ms:
                # Long runs: what is cut off still leaves these.
                self.say(f"    {name}: {spent:.2f} ms")
            times[name].append(spent)
            if told is not None:
                taken[name].append(told)
        return times, taken

    def _once(self, contender: Contender, repeat: int) -> tuple[float, TimeTaken | None]:
        with self.sharing(contender.mesh, contender.chunks), contender.around() as reported:
            before = reported.report().times if reported else None
            synchronize()
            dist.barrier()
            spent = self.worst(event_ms(contender.run, repeat=repeat))
            after = reported.report().times if reported else None
        return spent, _per_run(before, after, repeat)

    def _write(
        self,
        bench: Bench,
        contenders: Sequence[Contender],
        times: Times,
        taken: Mapping[str, list[TimeTaken]],
        of_all: Mapping[str, Any],
    ) -> None:
        """Append the rows of a case.

        Times are the slowest rank's. Further columns are the GPUs that share a sequence, and how;
        the contender on one GPU that `speedup` is against, its median over this one's; megabytes
        that each GPU sends in self-attention, by the formula of `sent_bytes`; and milliseconds of
        communication and attention as the report of the first rank has them, medians over rounds.
        """
        by_name = {c.name: c for c in contenders}
        medians = {name: statistics.median(t) for name, t in times.items()}

        def more(row: Row) -> Row:
            c = by_name[row["contender"]]
            parts = taken[c.name]
            return {
                "gpus": c.mesh.sequence,
                "layout": f"ulysses {c.mesh.ulysses} ring {c.mesh.ring} chunks {c.chunks}",
                "one_gpu": c.one_gpu,
                "speedup": round(medians.get(c.one_gpu, math.nan) / row["median_ms"], 4),
                "sent_mb": round(c.sent / 1e6, 1),
                "communication_ms": _median(x.communication_ms for x in parts),
                "attention_ms": _median(x.attention_ms for x in parts),
            }

        bench.write(times, **of_all, more=more)


def own_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens of [B, S, H, D]."""
    groups = parallel_groups()
    if groups is None:
        return x
    return x.tensor_split(groups.sequence.size, dim=1)[groups.sequence.index]


def sent_bytes(mesh: Mesh, *, tokens: int, heads: int, size: int, itemsize: int = 2) -> float:
    """Return the bytes one GPU sends in one self-attention layer without text.

    Ulysses: q, k, v and the output, all but its own share of them. Ring: K and V of its heads and
    of its Ulysses group's tokens, to the next GPU, in every step but the last.
    """
    own = tokens / mesh.sequence * heads * size * itemsize
    ulysses = 4 * own * (mesh.ulysses - 1) / mesh.ulysses
    return ulysses + 2 * own * (mesh.ring - 1)


def _per_run(before: TimeTaken | None, after: TimeTaken | None, repeat: int) -> TimeTaken | None:
    if after is None:
        return None
    begin = before or TimeTaken(communication_ms=0.0, attention_ms=0.0)
    return TimeTaken(
        communication_ms=(after.communication_ms - begin.communication_ms) / repeat,
        attention_ms=(after.attention_ms - begin.attention_ms) / repeat,
    )


def _median(values: Iterator[float]) -> float:
    found = list(values)
    return round(statistics.median(found), 3) if found else math.nan
