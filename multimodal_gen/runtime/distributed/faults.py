"""What is said when a run of several ranks fails: the error of the rank at fault, once per host.

A rank that fails takes the others with it: their exchanges break off, or wait in vain. All ranks
therefore tell each other why they end, through the store they met at, which needs no exchange. An
error of a rank's own is said at once. One that follows from another rank's waits for that rank to
speak; where none does, those that have not answered at all are named.
"""

import contextlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from multimodal_gen.errors import MultimodalGenError, RankError

__all__ = ["FaultBoard", "Verdict", "follows_from_another"]

# How much later than the first rank another one may notice that a third has gone.
_GRACE_S = 5.0
# How long the other ranks stay, so that the one at fault ends first.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rank that fails has to say.

    Attributes:
        text: a sentence that names the rank at fault; None where another rank of this host says it.
        mine: the sentence is about the error of this rank, or found out by it.
    """

    text: str | None
    mine: bool


class FaultBoard:
    """Where the ranks of a run tell each other why they end.

    Args:
        store: a store of torch.distributed that every rank reaches, whatever state its exchanges
            are in.
        rank: this process.
        num_ranks: how many there are.
        timeout: seconds the ranks wait for each other, for messages.
        host: what the ranks of this host have in common, and no other.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, timeout: float, *, host: str = ""
    ) -> None:
        self._store = dist.PrefixStore("faults", store)  # type: ignore[attr-defined]
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout
        self._host = host
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
            # Names of hosts repeat; their launchers have one process each.
            host = f"{socket.gethostname()} {os.getppid()}"
            return cls(store, rank, num_ranks, timeout, host=host)
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

    def verdict(self, error: BaseException) -> Verdict:
        """Tell of an error that ends this rank; return what this rank has to say."""
        told = f"{self._name(self._rank)}: {_in_one_line(error)}"
        try:
            said = self._after(told) if follows_from_another(error) else self._say(told)
            if said["rank"] == self._rank:
                return Verdict(text=said["text"], mine=True)
            elsewhere = said["host"] != self._host
            speaks = elsewhere and self._store.add(f"spoken/{self._host}", 1) == 1
            return Verdict(text=said["text"] if speaks else None, mine=False)
        except RuntimeError:
            return Verdict(text=told, mine=True)  # the process that kept the store has ended

    def let_it_end(self) -> None:
        """Stay until the launcher has seen the rank at fault end, and ends this one."""
        time.sleep(_STAY_S)

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
        while not self._has("done", self._timeout):
            before, beats = beats, self._store.add("beats", 0)
            if beats == before:
                raise RankError(
                    f"rank 0 must finish what the ranks computed, it gave no sign of life for "
                    f"{self._timeout:g} s"
                )

    def _has(self, key: str, seconds: float) -> bool:
        """Wait for a key; return whether it came."""
        # The store's own way to wait writes to the log when it did not.
        end = time.monotonic() + seconds
        while not (there := self._store.check([key])) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return bool(there)

    def _say(self, text: str) -> dict[str, Any]:
        """Say something unless another rank has spoken; return what is said, and by whom."""
        mine = json.dumps({"rank": self._rank, "host": self._host, "text": text})
        said: dict[str, Any] = json.loads(self._store.compare_set("said", "", mine))
        return said

    def _after(self, told: str) -> dict[str, Any]:
        """Return what is said of an error that may be another rank's."""
        first = self._store.add("lost", 1) == 1
        self._store.set(f"lost/{self._rank}", "")
        # The first to notice speaks where the rank at fault does not; the others hear it then.
        self._has("said", _GRACE_S if first else 2 * _GRACE_S)
        return self._say((self._silent() if first else None) or told)

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
