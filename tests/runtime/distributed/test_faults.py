"""What is said when ranks fail, in stores that threads share."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from multimodal_gen.errors import RankError, UsageError
from multimodal_gen.runtime.distributed import faults
from multimodal_gen.runtime.distributed.faults import FailureStore, follows_from_another

NO_ANSWER = RankError("the others must make the same call, got no answer")


@pytest.fixture
def stores(monkeypatch):
    monkeypatch.setattr(faults, "_GRACE_S", 0.5)
    store = dist.HashStore()
    return [FailureStore(store, rank, 4, timeout=1, host=f"host {rank // 2}") for rank in range(4)]


def reports(stores, errors):
    with ThreadPoolExecutor() as threads:
        return [(v.text, v.is_own) for v in threads.map(FailureStore.report, stores, errors)]


def test_only_the_rank_at_fault_speaks_on_its_host_and_one_rank_on_others(stores) -> None:
    oom = UsageError("the device\n  ran out of memory")
    said = reports(stores, [NO_ANSWER, oom, NO_ANSWER, NO_ANSWER])
    text, mine = said[1]
    assert mine
    assert text.startswith("rank 1 (pid ")
    assert text.endswith("): the device; ran out of memory")
    assert said[0] == (None, False)
    assert sorted(said[2:], key=str) == [(text, False), (None, False)]


def test_of_ranks_with_the_same_error_one_speaks_on_each_host(stores) -> None:
    said = reports(stores, [UsageError("mask must be the same on all ranks")] * 4)
    texts = [text for text, _ in said if text is not None]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert texts[0].endswith("): mask must be the same on all ranks")
    assert sum(mine for _, mine in said) == 1


def test_ranks_that_wait_in_vain_name_the_one_that_does_not(stores) -> None:
    said = reports([stores[0], stores[2], stores[3]], [NO_ANSWER] * 3)
    texts = {text for text, _ in said if text is not None}
    (text,) = texts
    assert text.startswith("rank 1 (pid ")
    assert text.endswith("): no answer within 1 s, or the connection was lost")


def test_of_the_ranks_that_are_silent_only_those_that_were_waited_for_are_named(stores) -> None:
    missed = RankError("the others must make the same call, got no answer", among=(0, 1))
    (text, _) = reports(stores[:1], [missed])[0]
    assert text.startswith("rank 1 (pid ")
    assert "rank 2" not in text


def test_of_the_ranks_that_are_silent_those_that_are_behind_are_named(stores, monkeypatch) -> None:
    monkeypatch.setattr(faults, "_HEARTBEAT_S", 0.05)
    with contextlib.ExitStack() as watching:
        for store, num_sent in zip(stores, (8, 7, 8, 8), strict=True):
            watching.enter_context(store.watching(no_end, num_sent=lambda n=num_sent: n))
        time.sleep(0.5)
        text = stores[0].report(NO_ANSWER).text
    assert text.startswith("rank 1 (pid ")
    assert "rank 2" not in text


def test_a_rank_of_another_host_says_what_it_heard_before_it_noticed(stores, monkeypatch) -> None:
    monkeypatch.setattr(faults, "_HEARTBEAT_S", 0.05)
    with stores[2].watching(no_end):
        text = stores[0].report(UsageError("no memory")).text
        time.sleep(0.5)
    assert stores[2].report(NO_ANSWER).text == text
    assert stores[3].report(NO_ANSWER).text is None


def test_a_network_that_fails_between_living_ranks_is_told_as_it_is(stores) -> None:
    said = reports(stores, [NO_ANSWER] * 4)
    (text,) = {text for text, _ in said if text is not None}
    assert text.endswith("): the others must make the same call, got no answer")


def test_a_defect_is_named_by_its_type(stores) -> None:
    assert stores[0].report(KeyError("x")).text.endswith("): KeyError: 'x'")


class _Gone:
    """A store whose process has ended."""

    def add(self, *args):
        raise dist.DistNetworkError("Connection reset by peer")

    check = set = add


def test_without_the_store_every_rank_speaks_for_itself(stores) -> None:
    stores[0]._store = _Gone()
    assert stores[0].report(NO_ANSWER).text == f"rank 0: {NO_ANSWER}"


def no_end(text) -> None:
    raise AssertionError("nothing is stuck")


@pytest.mark.slow
def test_ranks_wait_for_a_slow_first_rank_until_it_is_done(stores, monkeypatch) -> None:
    monkeypatch.setattr(faults, "_HEARTBEAT_S", 0.1)

    def lead():
        with stores[0].watching(no_end):
            time.sleep(2.5)  # longer than the timeout
            done = time.monotonic()
            stores[0].finish()
        return done

    with ThreadPoolExecutor() as threads:
        led = threads.submit(lead)
        followed = [threads.submit(store.finish) for store in stores[1:]]
        assert [follower.result() for follower in followed] == [None] * 3
        assert time.monotonic() >= led.result()


def test_a_first_rank_that_shows_no_life_is_given_up(stores) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 must finish .* gave no sign of life for 1 s"):
        stores[1].finish()
    assert time.monotonic() - start < 10


def test_a_rank_that_is_stuck_when_the_run_is_over_is_ended(stores, monkeypatch) -> None:
    for name in ("_HEARTBEAT_S", "_STUCK_S"):
        monkeypatch.setattr(faults, name, 0.1)
    ended, words = threading.Event(), []

    def end(text):
        words.append(text)
        ended.set()

    with stores[2].watching(end):
        text = stores[0].report(UsageError("no")).text
        assert ended.wait(10)
    assert words == [text]


def test_a_rank_that_is_stuck_ends_for_an_error_it_does_not_notice(stores, monkeypatch) -> None:
    for name in ("_HEARTBEAT_S", "_STUCK_S"):
        monkeypatch.setattr(faults, name, 0.1)
    ended, words, errors = threading.Event(), [], [None, NO_ANSWER]

    def end(text):
        words.append(text)
        ended.set()

    with stores[2].watching(end, lambda: errors.pop(0)):
        assert ended.wait(10)
    (text,) = words
    assert text.startswith("rank 0 (pid ")
    assert text.endswith("): no answer within 1 s, or the connection was lost")
    assert errors == []


def _raised(work) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("it must raise")


def _broken_exchange() -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:40130")


def _wrong_math() -> None:
    torch.ones(2) @ torch.ones(3)


def _no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("work", "follows"),
    [
        (_broken_exchange, True),
        (_wrong_math, False),
        (_no_memory, False),
        (lambda: {}["x"], False),
        # Torch's own check in the middle of an exchange, with a message like any other.
        (lambda: dist.distributed_c10d._object_to_tensor(None, "nowhere", None), True),
    ],
    ids=["broken", "math", "memory", "key", "torch.distributed"],
)
def test_errors_of_exchanges_are_told_from_a_ranks_own(work, follows) -> None:
    assert follows_from_another(_raised(work)) is follows


def test_a_rank_that_is_refused_by_another_follows_and_a_refusal_does_not() -> None:
    assert follows_from_another(RankError("rank 1 cannot run attention: no lse"))
    assert not follows_from_another(UsageError("no lse"))
