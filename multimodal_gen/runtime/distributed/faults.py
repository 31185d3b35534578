"""Who says what when a run of several ranks fails: the rank at fault, once, and nobody else.

A rank that fails takes the others with it: their exchanges break off, or wait in vain. All ranks
therefore tell each other why they end, through the store they met at, which needs no exchange. An
error of a rank's own is said at once. One that follows from another rank's waits for that rank to
speak; where none does, those that have not answered at all are named.
"""

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from multimodal_gen.errors import MultimodalGenError, RankError

__all__ = ["FaultBoard", "follows_from_another"]

# How much later than the first rank another one may notice that a third has gone.
_GRACE_S = 5.0
# How long the ranks that have nothing to say stay, so that the one at fault ends first.
_STAY_S = 10.0
_POLL_S = 0.05
_BEAT_S = 1.0
_EXCHANGING = ("torch.distributed.", "multimodal_gen.runtime.distributed.")
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")


def follows_from_another(error: BaseException) -> bool:
    """Tell whether an error may be nothing but another rank's, noticed here.

    Args:
        error: with its traceback: what torch raises in the middle of an exchange has no type.
    """
    if isinstance(error, (RankError, dist.DistError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, (MultimodalGenError, torch.OutOfMemoryError, NotImplementedError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return f"{where}.".startswith(_EXCHANGING) or any(text in str(error) for text in _BROKEN)


class FaultBoard:
    """Where the ranks of a run tell each other why they end.

    Args:
        store: a store of torch.distributed that every rank reaches, whatever state its exchanges
            are in.
        rank: this process.
        num_ranks: how many there are.
        timeout: seconds the ranks wait for each other, for messages.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout: float) -> None:
        self._store = dist.PrefixStore("faults", store)  # type: ignore[attr-defined]
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout
        self._store.set(
            f"name/{rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})"
        )

    @classmethod
    def meet(cls, timeout: float) -> "FaultBoard":
        """Return the board of the ranks that torchrun, or `start_ranks`, started.

        Raises:
            RankError: the process that keeps the store cannot be reached.
        """
        try:
            store, rank, num_ranks = next(rendezvous("env://"))
            return cls(store, rank, num_ranks, timeout)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"this rank must be able to reach the others, got: {error}") from error

    @property
    def rank(self) -> int:
        """This process."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self._num_ranks

    def verdict(self, error: BaseException) -> str | None:
        """Tell of an error that ends this rank; return what is to be said of it.

        Returns:
            A sentence that names the rank at fault, or None where another rank says it. In that
            case this rank has waited for that one to end first.
        """
        told = f"{self._name(self._rank)}: {_in_one_line(error)}"
        try:
            if not follows_from_another(error):
                return told if self._store.add("own", 1) == 1 else None
            return self._after(told)
        except RuntimeError:
            return told  # the process that kept the store has ended

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Tell the ranks that `follow` that this one is alive, and at the end that it is done."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):
                while not done.wait(_BEAT_S):
                    self._store.add("beats", 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self._store.set("done", "")

    def follow(self) -> None:
        """Wait until the rank that is `leading` is done.

        Raises:
            RankError: it has shown no life for the timeout.
        """
        beats = -1
        while True:
            try:
                self._store.wait(["done"], timedelta(seconds=self._timeout))
                return
            except RuntimeError:
                before, beats = beats, self._store.add("beats", 0)
                if beats == before:
                    raise RankError(
                        f"rank 0 must finish what the ranks computed, it gave no sign of life for "
                        f"{self._timeout:g} s"
                    ) from None

    def _after(self, told: str) -> str | None:
        """Return what to say of an error that may be another rank's."""
        first = self._store.add("lost", 1) == 1
        self._store.set(f"lost/{self._rank}", "")
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            if self._store.add("own", 0):
                break
            time.sleep(_POLL_S)
        else:
            if first:
                return self._silent() or told
        time.sleep(_STAY_S)
        return None

    def _silent(self) -> str | None:
        """Name the ranks that have not told of any error."""
        ranks = range(self._num_ranks)
        silent = [rank for rank in ranks if not self._store.check([f"lost/{rank}"])]
        if not silent:
            return None
        names = ", ".join(self._name(rank) for rank in silent)
        return f"{names}: no answer within {self._timeout:g} s, or the connection was lost"

    def _name(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"name/{rank}"]):
                return self._store.get(f"name/{rank}").decode()
        return f"rank {rank}"


def _in_one_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    text = "; ".join(line for line in lines if line)
    return text if isinstance(error, MultimodalGenError) else f"{type(error).__name__}: {text}"
