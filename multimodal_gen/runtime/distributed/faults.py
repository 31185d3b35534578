"""What a run of several ranks reports when it fails: the error of the rank at fault, once per host.

A rank that fails takes the others with it: their exchanges break off, or wait in vain. All ranks
therefore record why they end in the store they met at, which needs no exchange. An error of a
rank's own is recorded at once. One that follows from another rank's waits for that rank's; where
none comes, the ranks that have not answered at all are named.
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

# How much later than the first rank another one may notice that a third has gone.
_GRACE_S = 5.0
# How long the other ranks linger, so that the one at fault ends first.
_LINGER_S = 10.0
# How long a rank may go on after the run has failed.
_STUCK_S = 15.0
_POLL_S = 0.05
_HEARTBEAT_S = 1.0
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
    """What a rank that ends has to report.

    Attributes:
        text: a sentence that names the rank at fault; None where another rank of this host
            reports it.
        is_own: the sentence is about the error of this rank, or found out by it.
        linger_s: seconds to wait before the process ends, so that the launcher sees the rank at
            fault end first, and the ranks of other hosts read why.
    """

    text: str | None
    is_own: bool
    linger_s: float = 0.0


class FailureStore:
    """Where the ranks of a run record why they end.

    Args:
        store: a store of torch.distributed that every rank reaches, whatever state its exchanges
            are in.
        rank: this process.
        num_ranks: how many there are.
        timeout: seconds the ranks wait for each other, for messages.
        host: what the ranks of this host have in common, and no other.

    Attributes:
        rank: this process.
        num_ranks: how many there are.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, timeout: float, *, host: str = ""
    ) -> None:
        self._store = dist.PrefixStore("failures", store)  # type: ignore[attr-defined]
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout = timeout
        self._host = host
        if self._store.add(f"host/{host}", 1) == 1:
            self._store.add("hosts", 1)
        self._store.set(
            f"name/{rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})"
        )

    @classmethod
    def connect(cls, timeout: float) -> "FailureStore":
        """Return the store of the ranks that torchrun, or `launch_ranks`, started.

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

    def report(self, error: BaseException) -> FailureReport:
        """Record an error that ends this rank; return what this rank has to report."""
        try:
            return self._report_of(self._record(error))
        except RuntimeError:  # the process that kept the store has ended
            return FailureReport(text=self._describe(error), is_own=True)

    @contextlib.contextmanager
    def watching(
        self,
        end: Callable[[str | None], None],
        pending_error: Callable[[], BaseException | None] = lambda: None,
        num_sent: Callable[[], int] = lambda: 0,
    ) -> Iterator[None]:
        """Show the others that this process lives, and notice when the run has failed.

        Args:
            end: ends this process; called from another thread, with what it has to report or None,
                where the run has failed and the `with` block goes on nevertheless: it is stuck.
            pending_error: asked for an error that ends the run and that the `with` block does not
                notice where it is stuck; without waiting, and from another thread.
            num_sent: asked how many messages this rank has sent to others, which tells who is
                behind.
        """
        done = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(done, end, pending_error, num_sent), daemon=True
        )
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
        if self.rank == 0:
            self._store.set("done", "")
            # Should this process keep the store, it is to outlive what the others ask of it.
            left = self.num_ranks - 1
            self._wait_for(lambda: self._store.add("left", 0) >= left, _LINGER_S)
            return
        beats = -1
        while not self._wait_for(lambda: self._store.check(["done"]), self._timeout):
            before, beats = beats, self._store.add("heartbeats/0", 0)
            if beats == before:
                raise RankError(
                    f"rank 0 must finish what the ranks computed, it gave no sign of life for "
                    f"{self._timeout:g} s"
                )
        self._store.add("left", 1)

    def _watch(
        self,
        done: threading.Event,
        end: Callable[[str | None], None],
        pending_error: Callable[[], BaseException | None],
        num_sent: Callable[[], int],
    ) -> None:
        while self._beat(num_sent()):
            if done.wait(_HEARTBEAT_S):
                return
            error = pending_error()
            if error is not None:
                with contextlib.suppress(RuntimeError):
                    self._record(error)
        # Where the store is gone, the run is over too, and no rank can say why.
        if done.wait(_STUCK_S):
            return
        text: str | None = None
        with contextlib.suppress(RuntimeError):
            text = self._report_of(json.loads(self._store.get("failure"))).text
        end(text)

    def _beat(self, num_sent: int) -> bool:
        """Show that this process lives, and how far it is; return whether the run goes on."""
        try:
            self._store.set(f"sent/{self.rank}", str(num_sent))
            self._store.add(f"heartbeats/{self.rank}", 1)
            return not self._store.check(["failure"])
        except RuntimeError:
            return False

    def _wait_for(self, came: Callable[[], bool], seconds: float) -> bool:
        """Wait for something to come; return whether it did."""
        # The store's own way to wait writes to the log when it did not.
        end = time.monotonic() + seconds
        while not (there := came()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return there

    def _report_of(self, failure: dict[str, Any]) -> FailureReport:
        """Return what this rank has to report of the failure on record."""
        if failure["rank"] == self.rank:
            several = self._store.add("hosts", 0) > 1
            linger = 3 * _HEARTBEAT_S if several else 0.0
            return FailureReport(text=failure["text"], is_own=True, linger_s=linger)
        elsewhere = failure["host"] != self._host
        reports = elsewhere and self._store.add(f"reported/{self._host}", 1) == 1
        return FailureReport(
            text=failure["text"] if reports else None,
            is_own=False,
            linger_s=0.0 if elsewhere else _LINGER_S,
        )

    def _record(self, error: BaseException) -> dict[str, Any]:
        """Record an error unless another rank has; return the failure on record."""
        if not follows_from_another(error):
            return self._record_text(self._describe(error))
        first = self._store.add("waiting", 1) == 1
        self._store.set(f"waiting/{self.rank}", "")
        # The first to notice speaks where the rank at fault does not; the others read it then.
        patience = _GRACE_S if first else 2 * _GRACE_S
        self._wait_for(lambda: self._store.check(["failure"]), patience)
        among = getattr(error, "among", ()) or tuple(range(self.num_ranks))
        return self._record_text((self._silent(among) if first else None) or self._describe(error))

    def _record_text(self, text: str) -> dict[str, Any]:
        own = json.dumps({"rank": self.rank, "host": self._host, "text": text})
        failure: dict[str, Any] = json.loads(self._store.compare_set("failure", "", own))
        return failure

    def _describe(self, error: BaseException) -> str:
        return f"{self._name(self.rank)}: {_in_one_line(error)}"

    def _silent(self, among: tuple[int, ...]) -> str | None:
        """Name the ranks that have recorded no error: of those, who sent the fewest messages."""
        silent = [rank for rank in among if not self._store.check([f"waiting/{rank}"])]
        if not silent:
            return None
        sent = {rank: int(self._get(f"sent/{rank}", "0")) for rank in silent}
        behind = [rank for rank in silent if sent[rank] == min(sent.values())]
        names = ", ".join(self._name(rank) for rank in behind)
        return f"{names}: no answer within {self._timeout:g} s, or the connection was lost"

    def _name(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            return self._get(f"name/{rank}", f"rank {rank}")
        return f"rank {rank}"

    def _get(self, key: str, default: str) -> str:
        known = self._store.check([key])
        return self._store.get(key).decode() if known else default


def _in_one_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    text = "; ".join(line for line in lines if line)
    return text if isinstance(error, MultimodalGenError) else f"{type(error).__name__}: {text}"
