"""What counts as communication and what as attention."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.runtime.distributed import timing
from multimodal_gen.runtime.distributed.timing import (
    Stopwatch,
    Times,
    attending,
    exchanging,
    recording,
    sum_of,
)

CPU = torch.device("cpu")


@pytest.fixture
def wait(monkeypatch) -> Callable[[float], None]:
    """Lets milliseconds pass on a clock that otherwise stands still."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def pass_by(milliseconds: float) -> None:
        clock.now += milliseconds / 1e3

    return pass_by


def test_nothing_is_measured_where_nobody_records():
    times = Times()
    with exchanging(CPU), attending(CPU):
        pass
    assert times.taken() is None


def test_regions_add_up_for_who_records_them(wait):
    times, other = Times(), Times()
    with recording(times):
        for _ in range(2):
            with exchanging(CPU):
                wait(2)
        with recording(other), attending(CPU):
            wait(3)
    taken = times.taken()
    assert taken.as_dict() == {"communication_ms": 4, "attention_ms": 0}
    assert other.taken().as_dict() == {"communication_ms": 0, "attention_ms": 3}
    total = sum_of([taken, None, other.taken()])
    assert total.as_dict() == {"communication_ms": 4, "attention_ms": 3}
    assert sum_of([None]) is None


def test_what_attention_exchanges_is_communication(wait):
    times = Times()
    with recording(times), attending(CPU):
        with attending(CPU), exchanging(CPU), exchanging(CPU):
            wait(20)
        wait(1)
    assert times.taken().as_dict() == {"communication_ms": 20, "attention_ms": 1}


def test_a_region_that_raises_does_not_count(wait):
    def fail_late():
        wait(1)
        raise ValueError("no")

    times = Times()
    for region in (attending, exchanging):
        with pytest.raises(ValueError, match="no"), recording(times), region(CPU):
            fail_late()
    with recording(times), exchanging(CPU):
        pass
    assert times.taken().as_dict() == {"communication_ms": 0, "attention_ms": 0}


class FakeEvent:
    """A point in the time of one device, which passes one millisecond per record."""

    now = 0
    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        FakeEvent.made += 1

    def record(self, stream):
        assert stream == "the stream of cuda:1"
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def synchronize(self):
        assert self.at

    def elapsed_time(self, other):
        return other.at - self.at


def test_events_of_a_device_are_bounded_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    watch = Stopwatch()
    for _ in range(1000):
        with watch.on(torch.device("cuda:1")):
            pass
    assert FakeEvent.made <= 128
    assert watch.milliseconds() == 1000
    assert watch.milliseconds() == 1000


def test_a_copy_starts_anew(wait):
    times = Times()
    with recording(times), exchanging(CPU):
        wait(1)
    assert copy.deepcopy(times).taken() is None
