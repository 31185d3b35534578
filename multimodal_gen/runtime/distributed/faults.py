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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from multimodal_gen.errors import MultimodalGenError, RankError

__all__ = ["FailureReport", "FailureStore", "follows_from_another"]

# How much later than the first rank another one may notice that a third has gone.
_GRACE_S = 5.0
# How long the other ranks stay, so that the one at fault ends first.
_STAY_S = 10.0
# How long a rank may go on after the run is over.
_STUCK_S = 15.0
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
class FailureReport:
    """What a rank that fails has to say.

    Attributes:
        text: a sentence that names the rank at fault; None where another rank of this host says it.
        mine: the sentence is about the error of this rank, or found out by it.
        stay_s: seconds to stay, so that the launcher sees the rank at fault end first, and the
            ranks of other hosts hear why.
    """

    text: str | None
    mine: bool
    stay_s: float = 0.0


class FailureStore:
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
        if self._store.add(f"host/{host}", 1) == 1:
            self._store.add("hosts", 1)
        self._store.set(
            f"name/{rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})"
        )

    @classmethod
    def meet(cls, timeout: float) -> "FailureStore":
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

    def verdict(self, error: BaseException) -> FailureReport:
        """Tell of an error that ends this rank; return what this rank has to say."""
        try:
            return self._heard(self._said_of(error))
        except RuntimeError:  # the process that kept the store has ended
            return FailureReport(text=self._own(error), mine=True)

    @contextlib.contextmanager
    def watched(
        self,
        end: Callable[[str | None], None],
        lost: Callable[[], BaseException | None] = lambda: None,
        told: Callable[[], int] = lambda: 0,
    ) -> Iterator[None]:
        """Show the others that this process lives, and notice when the run is over.

        Args:
            end: ends this process; called from another thread, with what it has to say or None,
                where the run is over and the `with` block goes on nevertheless: it is stuck.
            lost: asked for an error that ends the run and that the `with` block does not notice
                where it is stuck; without waiting, and from another thread.
            told: asked how many messages this rank has sent to others, which tells who is behind.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done, end, lost, told), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def finish(self) -> None:
        """Wait until rank 0 is done; every rank calls it when it is.

        Raises:
            RankError: rank 0 has shown no life for the timeout.
        """
        if self._rank == 0:
            self._store.set("done", "")
            # Should this process keep the store, it is to outlive what the others ask of it.
            self._wait_for(lambda: self._store.add("followed", 0) >= self._num_ranks - 1, _STAY_S)
            return
        beats = -1
        while not self._wait_for(lambda: self._store.check(["done"]), self._timeout):
            before, beats = beats, self._store.add("beats/0", 0)
            if beats == before:
                raise RankError(
                    f"rank 0 must finish what the ranks computed, it gave no sign of life for "
                    f"{self._timeout:g} s"
                )
        self._store.add("followed", 1)

    def _watch(
        self,
        done: threading.Event,
        end: Callable[[str | None], None],
        lost: Callable[[], BaseException | None],
        told: Callable[[], int],
    ) -> None:
        while self._goes_on(told()):
            if done.wait(_BEAT_S):
                return
            error = lost()
            if error is not None:
                with contextlib.suppress(RuntimeError):
                    self._said_of(error)
        # Where the store is gone, the run is over too, and nobody is left to say why.
        if done.wait(_STUCK_S):
            return
        text: str | None = None
        with contextlib.suppress(RuntimeError):
            text = self._heard(json.loads(self._store.get("said"))).text
        end(text)

    def _goes_on(self, told: int) -> bool:
        """Show that this process lives, and how far it is; return whether the run goes on."""
        try:
            self._store.set(f"told/{self._rank}", str(told))
            self._store.add(f"beats/{self._rank}", 1)
            return not self._store.check(["said"])
        except RuntimeError:
            return False

    def _wait_for(self, came: Callable[[], bool], seconds: float) -> bool:
        """Wait for something to come; return whether it did."""
        # The store's own way to wait writes to the log when it did not.
        end = time.monotonic() + seconds
        while not (there := came()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return there

    def _heard(self, said: dict[str, Any]) -> FailureReport:
        """Return what this rank has to say of what is said."""
        if said["rank"] == self._rank:
            several = self._store.add("hosts", 0) > 1
            return FailureReport(
                text=said["text"], mine=True, stay_s=3 * _BEAT_S if several else 0.0
            )
        elsewhere = said["host"] != self._host
        speaks = elsewhere and self._store.add(f"spoken/{self._host}", 1) == 1
        return FailureReport(
            text=said["text"] if speaks else None, mine=False, stay_s=0.0 if elsewhere else _STAY_S
        )

    def _say(self, text: str) -> dict[str, Any]:
        """Say something unless another rank has spoken; return what is said, and by whom."""
        mine = json.dumps({"rank": self._rank, "host": self._host, "text": text})
        said: dict[str, Any] = json.loads(self._store.compare_set("said", "", mine))
        return said

    def _said_of(self, error: BaseException) -> dict[str, Any]:
        """Tell of an error unless another rank has spoken; return what is said, and by whom."""
        if not follows_from_another(error):
            return self._say(self._own(error))
        first = self._store.add("lost", 1) == 1
        self._store.set(f"lost/{self._rank}", "")
        # The first to notice speaks where the rank at fault does not; the others hear it then.
        patience = _GRACE_S if first else 2 * _GRACE_S
        self._wait_for(lambda: self._store.check(["said"]), patience)
        among = getattr(error, "among", ()) or tuple(range(self._num_ranks))
        return self._say((self._silent(among) if first else None) or self._own(error))

    def _own(self, error: BaseException) -> str:
        return f"{self._name(self._rank)}: {_in_one_line(error)}"

    def _silent(self, among: tuple[int, ...]) -> str | None:
        """Name the ranks that have not told of any error: of those, who sent fewest messages."""
        silent = [rank for rank in among if not self._store.check([f"lost/{rank}"])]
        if not silent:
            return None
        told = {rank: self._told(rank) for rank in silent}
        behind = [rank for rank in silent if told[rank] == min(told.values())]
        names = ", ".join(self._name(rank) for rank in behind)
        return f"{names}: no answer within {self._timeout:g} s, or the connection was lost"

    def _told(self, rank: int) -> int:
        known = self._store.check([f"told/{rank}"])
        return int(self._store.get(f"told/{rank}")) if known else 0

    def _name(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"name/{rank}"]):
                return self._store.get(f"name/{rank}").decode()
        return f"rank {rank}"


def _in_one_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    text = "; ".join(line for line in lines if line)
    return text if isinstance(error, MultimodalGenError) else f"{type(error).__name__}: {text}"
