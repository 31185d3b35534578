"""How long exchanges between ranks and attention take, measured while they run.

On a GPU a region is two events on its current stream: it lasts as long as the stream is kept from
going on, so an exchange that runs behind a kernel counts only where it is waited for. The host
waits for nothing before the times are read. Elsewhere the clock of the host counts.

Exchanges say that they are ones; a recording collects those made inside of it:

    with recording(times):
        with exchanging(x.device): ...   # in the exchange
        with attending(x.device): ...    # around a kernel
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

# Regions whose events may be unread. By the time as many have followed, the device is through with
# the first: a launch queue is shorter than that.
_UNREAD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTaken:
    """What was measured on one rank, in milliseconds.

    Attributes:
        communication_ms: exchanging data, packing and waiting for it; not what ran behind a kernel.
        attention_ms: attention itself.
    """

    communication_ms: float
    attention_ms: float

    def as_dict(self) -> dict[str, float]:
        """Return the times as JSON data."""
        return {
            "communication_ms": round(self.communication_ms, 3),
            "attention_ms": round(self.attention_ms, 3),
        }


def sum_of(times: Iterable[TimeTaken | None]) -> TimeTaken | None:
    """Return the sum of what was measured, or None where nothing was."""
    found = [x for x in times if x is not None]
    if not found:
        return None
    return TimeTaken(
        communication_ms=sum(x.communication_ms for x in found),
        attention_ms=sum(x.attention_ms for x in found),
    )


class Stopwatch:
    """Adds up the time of regions. A copy starts anew."""

    def __init__(self) -> None:
        self._total = 0.0
        self._unread: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Count the block as a region, unless it raises."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._total += (time.perf_counter() - begin) * 1e3
            return
        start, stop = self._events()
        start.record(torch.cuda.current_stream(device))
        yield
        stop.record(torch.cuda.current_stream(device))
        self._unread.append((start, stop))

    def milliseconds(self) -> float:
        """Return the time so far; waits for the regions that the device is not through with."""
        while self._unread:
            self._read()
        return self._total

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if len(self._unread) >= _UNREAD:
            return self._read()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return start, stop

    def _read(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Add the oldest region, and return its events for another one."""
        start, stop = self._unread.popleft()
        stop.synchronize()
        self._total += start.elapsed_time(stop)
        return start, stop

    def __reduce__(self) -> tuple[type["Stopwatch"], tuple[()]]:
        return Stopwatch, ()


class Times:
    """What one layer, or one denoiser, takes on this rank. A copy starts anew.

    Attributes:
        exchanging: communication outside of attention.
        exchanging_inside: communication inside of it.
        attending: attention, with what it exchanges.
        is_exchanging: whether a region of the first two runs now.
        is_attending: whether one of attention does.
        any: whether any region has begun.
    """

    def __init__(self) -> None:
        self.exchanging = Stopwatch()
        self.exchanging_inside = Stopwatch()
        self.attending = Stopwatch()
        self.is_attending = self.is_exchanging = self.any = False

    def taken(self) -> TimeTaken | None:
        """Return the times so far, or None where nothing was measured."""
        if not self.any:
            return None
        inside = self.exchanging_inside.milliseconds()
        return TimeTaken(
            communication_ms=self.exchanging.milliseconds() + inside,
            attention_ms=max(0.0, self.attending.milliseconds() - inside),
        )

    def __reduce__(self) -> tuple[type["Times"], tuple[()]]:
        return Times, ()


_RECORDING: ContextVar[Times | None] = ContextVar("multimodal_gen_times", default=None)


@contextmanager
def recording(times: Times | None) -> Iterator[None]:
    """Let what is exchanged and attended to inside the block count for `times`."""
    token = _RECORDING.set(times)
    try:
        yield
    finally:
        _RECORDING.reset(token)


@contextmanager
def exchanging(device: torch.device) -> Iterator[None]:
    """Count the block as communication, even inside of attention; inside of another, once."""
    times = _RECORDING.get()
    if times is None or times.is_exchanging:
        yield
        return
    times.any = times.is_exchanging = True
    watch = times.exchanging_inside if times.is_attending else times.exchanging
    try:
        with watch.on(device):
            yield
    finally:
        times.is_exchanging = False


@contextmanager
def attending(device: torch.device) -> Iterator[None]:
    """Count the block as attention, without what it exchanges; inside of another, once."""
    times = _RECORDING.get()
    if times is None or times.is_attending:
        yield
        return
    times.any = times.is_attending = True
    try:
        with times.attending.on(device):
            yield
    finally:
        times.is_attending = False
