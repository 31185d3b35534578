"""What counts as communication and what as attention."""

import copy
import time

import pytest
import torch

from multimodal_gen.runtime.distributed.timing import (
    Stopwatch,
    Times,
    attending,
    exchanging,
    recording,
    sum_of,
)

CPU = torch.device("cpu")


def wait(milliseconds):
    time.sleep(milliseconds / 1e3)


def fail_late():
    wait(1)
    raise ValueError("no")


def test_nothing_is_measured_where_nobody_records():
    times = Times()
    with exchanging(CPU), attending(CPU):
        pass
    assert times.taken() is None


def test_regions_add_up_for_who_records_them():
    times, other = Times(), Times()
    with recording(times):
        for _ in range(2):
            with exchanging(CPU):
                wait(2)
        with recording(other), attending(CPU):
            wait(2)
    taken = times.taken()
    assert taken.communication_ms >= 4
    assert taken.attention_ms == 0
    assert other.taken().attention_ms >= 2
    assert other.taken().communication_ms == 0
    total = sum_of([taken, None, other.taken()])
    assert total.communication_ms == taken.communication_ms
    assert total.attention_ms == other.taken().attention_ms
    assert sum_of([None]) is None


def test_what_attention_exchanges_is_communication():
    times = Times()
    with recording(times), attending(CPU):
        with attending(CPU), exchanging(CPU), exchanging(CPU):
            wait(20)
        wait(1)
    assert 20 <= times.taken().communication_ms < 40
    assert 1 <= times.taken().attention_ms < 20


def test_a_region_that_raises_does_not_count():
    times = Times()
    for region in (attending, exchanging):
        with pytest.raises(ValueError, match="no"), recording(times), region(CPU):
            fail_late()
    with recording(times), exchanging(CPU):
        pass
    assert times.taken().attention_ms == 0
    assert times.taken().communication_ms < 1


class FakeEvent:
    """A point in device time that passes one millisecond per record."""

    now = 0
    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        FakeEvent.made += 1

    def record(self):
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def synchronize(self):
        assert self.at

    def elapsed_time(self, other):
        return other.at - self.at


def test_events_of_a_device_are_bounded_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    watch = Stopwatch()
    for _ in range(1000):
        with watch.on(torch.device("cuda")):
            pass
    assert FakeEvent.made <= 128
    assert watch.milliseconds() == 1000
    assert watch.milliseconds() == 1000


def test_a_copy_starts_anew():
    times = Times()
    with recording(times), exchanging(CPU):
        wait(1)
    assert copy.deepcopy(times).taken() is None
