"""Ranks that disagree raise everywhere, in bounded time, instead of waiting for each other."""

import time

import pytest
import torch

from multimodal_gen.errors import RankError, UsageError
from multimodal_gen.runtime.distributed import handshake as handshake_module
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.processes import World


def lengths_of(call, facts, length):
    return handshake(parallel_groups(), call, facts, (length,))


def lengths_by_rank():
    with torch.inference_mode():
        return lengths_of("by_rank", {"batch": 1}, 10 + parallel_groups().rank)


def error_of(calls):
    """Return the kind and text of the error of this rank's call, and the seconds it took."""
    groups = parallel_groups()
    began = time.monotonic()
    call = calls[groups.rank]
    try:
        handshake(groups, call["call"], call["facts"], (1, 2), call.get("refusal"))
    except (RankError, UsageError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def silent_partner():
    """Make a call on rank 0 alone."""
    if parallel_groups().rank == 1:
        return None
    return error_of([{"call": "alone", "facts": {}}] * 2)


def late_partner(facts_later, length_later):
    """Make a call of a known kind while rank 1 makes another; return what is raised, and when."""
    groups = parallel_groups()
    handshake(groups, "kind", {"batch": 1}, (2,))
    later = groups.rank == 1
    facts, length = (facts_later, length_later) if later else ({"batch": 1}, 2)
    raised = []
    for _ in range(2):
        try:
            handshake(groups, "kind", facts, (length,), wait=False)
            raised.append(None)
        except (RankError, UsageError) as error:
            raised.append((type(error).__name__, str(error)))
            break
    return raised


def forget_kinds(bound):
    """Make calls of four kinds where rank 0 remembers `bound` of them, then one that it forgot."""
    groups = parallel_groups()
    if groups.rank == 0:
        handshake_module._MOST_KINDS = bound
    found = [lengths_of(f"kind {i}", {}, groups.rank) for i in range(4)]
    known = len(groups.handshakes.agreed)
    found += [handshake(groups, "kind 0", {}, (groups.rank,), wait=False) for _ in range(2)]
    return found, known


def test_lengths_of_all_ranks_are_known_afterwards(four_ranks):
    assert four_ranks.run(Mesh(ulysses=4), lengths_by_rank) == [((10,), (11,), (12,), (13,))] * 4
    by_pair = four_ranks.run(Mesh(cfg=2, ulysses=2), lengths_by_rank)
    assert by_pair == [((10,), (11,))] * 2 + [((12,), (13,))] * 2


def test_calls_of_a_known_kind_need_not_wait(tmp_path):
    with World(2, tmp_path) as world:
        assert world.run(Mesh(ulysses=2), late_partner, {"batch": 1}, 2) == [[None, None]] * 2


def test_a_rank_may_forget_kinds_that_others_remember(tmp_path):
    with World(2, tmp_path) as world:
        first, second = world.run(Mesh(ulysses=2), forget_kinds, 2)
    assert first == ([((0,), (1,))] * 6, 2)
    assert second == ([((0,), (1,))] * 6, 4)


def test_a_call_that_did_not_wait_is_caught_in_the_next(tmp_path):
    message = "batch must be the same on all ranks in kind, got 1 on rank 0, 3 on rank 1"
    with World(2, tmp_path) as world:
        first, second = world.run(Mesh(ulysses=2), late_partner, {"batch": 3}, 2)
    assert second == [("UsageError", message)]
    assert first == [None, ("UsageError", message)]


def test_lengths_that_a_call_took_for_granted_are_caught_in_the_next(tmp_path):
    with World(2, tmp_path) as world:
        first, _ = world.run(Mesh(ulysses=2), late_partner, {"batch": 1}, 5)
    kind, text = first[1]
    assert kind == "RankError"
    assert "earlier calls of the same kind, ((2,), (2,)), got ((2,), (5,)); pass seq_lens" in text


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"call": "attention", "facts": {"attn_mask": "none"}},
            {"call": "attention", "facts": {"attn_mask": "bool [2, 6]"}},
            "attn_mask must be the same on all ranks in attention, got none on rank 0, bool [2, 6] "
            "on rank 1",
        ),
        (
            {"call": "attention", "facts": {"dtype": torch.float16}},
            {"call": "attention", "facts": {"dtype": torch.float32}},
            "dtype must be the same on all ranks in attention, got torch.float16 on rank 0, "
            "torch.float32 on rank 1",
        ),
        (
            {"call": "blocks.0", "facts": {}},
            {"call": "blocks.1", "facts": {}},
            "call must be the same on all ranks, got blocks.0 on rank 0, blocks.1 on rank 1",
        ),
    ],
    ids=["mask", "dtype", "call"],
)
def test_ranks_that_disagree_all_say_who_says_what(two_ranks, first, second, message):
    outcomes = two_ranks.run(Mesh(ulysses=2), error_of, [first, second])
    assert [outcome[:2] for outcome in outcomes] == [("UsageError", message)] * 2


def test_a_rank_that_refuses_its_call_tells_the_others(two_ranks):
    calls = [
        {"call": "attention", "facts": {}},
        {"call": "attention", "facts": {}, "refusal": UsageError("q must be 4-D, got 3-D")},
    ]
    first, second = two_ranks.run(Mesh(ring=2), error_of, calls)
    told = "rank 1 cannot run attention: q must be 4-D, got 3-D"
    assert first[:2] == ("RankError", told)
    assert second[:2] == ("UsageError", "q must be 4-D, got 3-D")


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u4e16", "\U0001f600", "\x00", "\ud800", '"'])
def test_a_long_refusal_is_told_up_to_what_fits(two_ranks, letter):
    refusal = UsageError("must be short, got " + letter * 2000)
    calls = [{"call": "attention", "facts": {}}, {"call": "attention", "facts": {}}]
    calls[1]["refusal"] = refusal
    first, second = two_ranks.run(Mesh(ulysses=2), error_of, calls)
    assert second[:2] == ("UsageError", str(refusal))
    told = "rank 1 cannot run attention: must be short, got "
    assert first[0] == "RankError"
    assert first[1].startswith(told)
    assert set(first[1].removeprefix(told)) == {letter.encode(errors="replace").decode()}


@pytest.mark.slow
def test_a_rank_that_gets_no_answer_gives_up(tmp_path):
    with World(2, tmp_path, control_timeout=2.0) as world:
        kind, text, seconds = world.run(Mesh(ulysses=2), silent_partner)[0]
    assert kind == "RankError"
    assert text.startswith(
        "the other ranks of [0, 1] must make the same call, alone, got no answer; look for the "
        "first error of another rank ("
    )
    assert seconds > 1.5


def test_a_rank_on_its_own_agrees_with_itself(tmp_path):
    with World(1, tmp_path) as world:
        assert world.run(Mesh(), lengths_of, "attention", {"batch": 2}, 7) == [((7,),)]
