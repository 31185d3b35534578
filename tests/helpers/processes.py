"""Runs a function in several processes that form a world, for a bounded time."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.runtime.distributed.groups import (
    build_groups,
    init_world,
    parallel_groups,
    use_parallel_groups,
)
from multimodal_gen.runtime.distributed.mesh import Mesh

# What torch.testing imports when it first compares tensors, which takes more than a second.
ASSERTIONS = "torch.distributed.tensor"


def own(x: torch.Tensor, lengths: Sequence[int], front: int = 0, back: int = 0) -> torch.Tensor:
    """Return what this rank holds of a whole sequence.

    Args:
        x: [B, front + sum S + back, ...].
        lengths: S of each rank of the sequence.
        front: rows in front that all ranks hold.
        back: such rows at the end.

    Returns:
        [B, front + S + back, ...].
    """
    groups = parallel_groups()
    assert groups is not None, "ranks of a mesh call this"
    rank = groups.sequence.index
    start = front + sum(lengths[:rank])
    tokens = x[:, start : start + lengths[rank]]
    return torch.cat((x[:, :front], tokens, x[:, x.shape[1] - back :]), dim=1)


class World:
    """Processes that wait for functions to run, each as one rank of a mesh.

    Use it as a context manager: leaving it kills the processes.

    Args:
        num_ranks: how many processes.
        folder: an empty folder where they meet.
        timeout: seconds until a function that has not returned everywhere counts as hanging.
        exchange_timeout: seconds until torch gives up an exchange of data.
        control_timeout: seconds until ranks give up a handshake.
        device_type: "cpu", or "cuda" for one GPU each.
        preload: modules to import once, before processes on CPUs are forked from that; those that
            are not installed are left out. The first world of a process decides.
    """

    def __init__(
        self,
        num_ranks: int,
        folder: Path,
        *,
        timeout: float = 90.0,
        exchange_timeout: float = 60.0,
        control_timeout: float = 60.0,
        device_type: str = "cpu",
        preload: Sequence[str] = (),
    ) -> None:
        self.num_ranks = num_ranks
        self._timeout = timeout
        # Not forks of the tests' process, whose threads and locks they would inherit: forks of one
        # that has only imported, which is much cheaper than importing in each.
        context: BaseContext
        if device_type == "cpu":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, ASSERTIONS, *preload])
        else:
            context = multiprocessing.get_context("spawn")
        meeting = str(folder / "meet")
        settings = (num_ranks, meeting, exchange_timeout, control_timeout, device_type)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, *settings, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, mesh: Mesh | None, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `function(*args)` returns on each rank.

        Args:
            mesh: the groups that are in use while it runs; None for none.
            function: importable by name from the other processes.
            *args: picklable.

        Raises:
            AssertionError: it raised on a rank, a rank died, or one did not return in time.
        """
        results = self.outcomes(mesh, function, *args)
        failed = [f"rank {i}: {text}" for i, (ok, text) in enumerate(results) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def outcomes(
        self, mesh: Mesh | None, function: Callable[..., Any], *args: Any
    ) -> list[tuple[bool, Any]]:
        """Return (True, value) or (False, traceback) of `function(*args)` on each rank."""
        for pipe in self._pipes:
            pipe.send((mesh, function, args))
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self._timeout
        while len(results) < self.num_ranks:
            pending = {id(self._pipes[i]): i for i in range(self.num_ranks) if i not in results}
            pipes = [self._pipes[i] for i in pending.values()]
            ready: list[Any] = wait(pipes, timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = pending[id(pipe)]
                results[rank] = self._receive(rank)
            if not ready:
                self.close()
                late = sorted(pending.values())
                raise AssertionError(f"ranks {late} did not return within {self._timeout} s")
        return [results[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            outcome: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return False, f"died with exit code {self._processes[rank].exitcode}"
        return outcome


def _serve(
    rank: int,
    num_ranks: int,
    meeting: str,
    exchange_timeout: float,
    control_timeout: float,
    device_type: str,
    pipe: Connection,
) -> None:
    """Run what arrives, for ever; killed by its parent."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=exchange_timeout)
    where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": num_ranks}
    init_world(device_type, timeout=timeout, **where)  # type: ignore[arg-type]
    groups: dict[Mesh | None, Any] = {None: None}
    while True:
        try:
            mesh, function, args = pipe.recv()
        except EOFError:
            return
        try:
            if mesh not in groups:
                groups[mesh] = build_groups(
                    mesh, timeout=timeout, control_timeout=timedelta(seconds=control_timeout)
                )
            with use_parallel_groups(groups[mesh]):
                outcome = (True, function(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)
