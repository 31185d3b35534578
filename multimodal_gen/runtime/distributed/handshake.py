"""Ranks tell each other what they are about to exchange.

Ranks that disagree (a mask here, none there; other shapes) would wait for each other for ever, or
read each other's numbers as something else. Instead all of them raise, within a bounded time.

Every call sends one message, on the CPU, in a group of its own. The first call of a kind waits for
the messages of the others, as do all calls whose data is on the CPU. Later ones on an accelerator
do not: what they hear is looked at in the next call, while the exchange is still queued or stuck.

Calls that are alike in everything are told apart by how far a rank is in its denoising
(`Progress`), so that a rank which left one out is found.
"""

import contextlib
import json
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from multimodal_gen.errors import MultimodalGenError, RankError, UsageError
from multimodal_gen.runtime.distributed.groups import Group, ParallelGroups

__all__ = ["Progress", "handshake", "pending_error"]

_MESSAGE_BYTES = 4096
# Behind them a message has its `Progress`, which changes where the rest of it does not.
_TURN = struct.Struct("=3q")
_UNKNOWN = -1
_TURN_NAMES = ("denoising step", "denoiser call", "number of exchanges in this denoiser call")
# What a refusal may take of them in UTF-8; JSON spells a control character with six bytes.
_REFUSAL_BYTES = 600
_SKIPPED = "; a rank left a call out, and all have to make the same ones"
# A rank that has something to say against its own call lets nobody wait for long.
_REFUSAL_TIMEOUT = timedelta(seconds=5)


class Progress(NamedTuple):
    """How far a rank is, in numbers that start anew with every request; -1 for an unknown one.

    Attributes:
        step: the denoising step.
        call: the denoiser's calls of this request, or of this step, before this one.
        exchange: exchanges of layers in this call of the denoiser before this one.
    """

    step: int = _UNKNOWN
    call: int = _UNKNOWN
    exchange: int = _UNKNOWN


def handshake(
    groups: ParallelGroups,
    call: str,
    facts: Mapping[str, object],
    lengths: tuple[int, ...],
    refusal: MultimodalGenError | None = None,
    *,
    turn: Progress | None = None,
    wait: bool = True,
) -> tuple[tuple[int, ...], ...]:
    """Return `lengths` of every rank of the sequence, once all of them make the same call.

    Args:
        groups: this process's groups.
        call: what is about to be done, for messages.
        facts: what has to be the same on every rank; compared as text.
        lengths: what may differ.
        refusal: why this rank cannot make the call, or None. The others are told, then it is
            raised.
        turn: how far this rank is, which has to be the same on every rank, too; None where nothing
            tells.
        wait: hear the others before a call of a known kind, too.

    Raises:
        UsageError: a fact or the turn differs between ranks; raised on all of them.
        RankError: a rank makes another call, refuses, or does not answer in time; or lengths
            changed that a call took for granted.
    """
    error = _look_at_pending(groups)
    if error is not None:
        raise error
    turn = turn or Progress()
    kind = (call, *facts.items(), lengths)
    agreements = groups.agreements
    known = agreements.known.get(kind)
    said = known[0] if known and refusal is None else _message(call, facts, lengths, refusal)
    hearing = _Hearing(groups.control, said + _TURN.pack(*turn), call)
    agreements.told += 1
    if refusal is not None:
        with contextlib.suppress(RankError):
            hearing.wait(_REFUSAL_TIMEOUT)
        raise refusal
    if known and not wait:
        agreements.pending.append((hearing, turn, *known[1:]))
        return known[2]
    heard = hearing.wait()
    if known and heard == _at(turn, known[1]):
        return known[2]
    messages = _split(heard)
    agreed = _verdict(groups.control, messages)
    agreements.known[kind] = (said, [message for message, _ in messages], agreed)
    return agreed


def pending_error(groups: ParallelGroups) -> MultimodalGenError | None:
    """Return what this rank's next call would raise, as far as is known by now; does not wait.

    A rank never gets there that waits for its device, and that for another which is not coming, or
    which does something else.
    """
    for hearing, *expected in tuple(groups.agreements.pending):
        error = _error_of(groups, hearing, *expected) if hearing.is_over() else None
        if error is not None:
            return error
    return None


def _look_at_pending(groups: ParallelGroups) -> MultimodalGenError | None:
    """Return why a call that did not wait should not have been made; waits for what was said."""
    while groups.agreements.pending:
        error = _error_of(groups, *groups.agreements.pending.pop())
        if error is not None:
            return error
    return None


def _error_of(
    groups: ParallelGroups,
    hearing: "_Hearing",
    turn: Progress,
    known: list[bytes],
    lengths: tuple[tuple[int, ...], ...],
) -> MultimodalGenError | None:
    """Return what is wrong with what was said in a call of a known kind, once it is heard."""
    try:
        heard = hearing.wait()
        if heard == _at(turn, known):
            return None
        found = _verdict(groups.control, _split(heard))
    except MultimodalGenError as error:
        return error
    return RankError(
        f"lengths must be those ranks had in earlier calls of the same kind, {lengths}, got "
        f"{found}; pass seq_lens where they change"
    )


def _at(turn: Progress, messages: list[bytes]) -> bytes:
    """Return what is heard when all ranks say what they said before, at this turn."""
    packed = _TURN.pack(*turn)
    return b"".join(message + packed for message in messages)


def _split(heard: bytearray) -> list[tuple[bytes, Progress]]:
    """Return every rank's message, and its turn."""
    size = _MESSAGE_BYTES + _TURN.size
    ends = range(_MESSAGE_BYTES, len(heard), size)
    return [
        (bytes(heard[end - _MESSAGE_BYTES : end]), Progress(*_TURN.unpack_from(heard, end)))
        for end in ends
    ]


def _message(
    call: str,
    facts: Mapping[str, object],
    lengths: tuple[int, ...],
    refusal: MultimodalGenError | None,
) -> bytes:
    message = {
        "call": call,
        "facts": {name: str(fact) for name, fact in facts.items()},
        "lengths": lengths,
        "refusal": _cut(str(refusal)) if refusal else None,
    }
    text = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    assert len(text) <= _MESSAGE_BYTES, "facts are short"
    return text.ljust(_MESSAGE_BYTES)


def _cut(text: str) -> str:
    """Return the beginning of `text` that fits into a message, without half a character."""
    # What UTF-8 cannot spell, half of a surrogate pair, is replaced.
    return text.encode(errors="replace")[:_REFUSAL_BYTES].decode(errors="ignore")


class _Hearing:
    """A message that was sent, and those of all ranks, under way.

    Args:
        group: who takes part.
        said: the message, as long as everybody's.
        call: what it is about, for errors.

    Raises:
        RankError: it could not be sent.
    """

    def __init__(self, group: Group, said: bytes, call: str) -> None:
        self._heard = bytearray(len(said) * len(group.ranks))
        self._among = group.ranks
        self._failure = (
            f"the other ranks of {list(group.ranks)} must make the same call, {call}, got no "
            f"answer; look for the first error of another rank"
        )
        self._work: Any = None
        if group.handle is None:
            self._heard[:] = said
            return
        sent = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        received = [*torch.frombuffer(self._heard, dtype=torch.uint8).view(-1, len(said))]
        try:
            self._work = dist.all_gather(received, sent, group=group.handle, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from None

    def wait(self, timeout: timedelta | None = None) -> bytearray:
        """Return what all ranks said, one after another.

        Raises:
            RankError: not all of them did, in time.
        """
        try:
            if self._work is not None:
                self._work.wait(*([] if timeout is None else [timeout]))
        except RuntimeError as error:
            raise self._lost(error) from None
        return self._heard

    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._work is None or self._work.is_completed()

    def _lost(self, error: RuntimeError) -> RankError:
        first_line = str(error).partition("\n")[0].partition(". ")[0]
        return RankError(f"{self._failure} ({first_line})", self._among)


def _verdict(group: Group, said: list[tuple[bytes, Progress]]) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of every rank, or raise where ranks disagree."""
    messages: list[dict[str, Any]] = [json.loads(message) for message, _ in said]
    for rank, message in zip(group.ranks, messages, strict=True):
        if message["refusal"]:
            raise RankError(f"rank {rank} cannot run {message['call']}: {message['refusal']}")
    _compare("call", [message["call"] for message in messages], group)
    call = messages[0]["call"]
    for name in {name: None for message in messages for name in message["facts"]}:
        _compare(name, [message["facts"].get(name) for message in messages], group, call)
    turns = zip(*(turn for _, turn in said), strict=True)
    for name, numbers in zip(_TURN_NAMES, turns, strict=True):
        _compare(name, ["unknown" if n == _UNKNOWN else n for n in numbers], group, call, _SKIPPED)
    return tuple(tuple(message["lengths"]) for message in messages)


def _compare(name: str, values: list[Any], group: Group, call: str = "", advice: str = "") -> None:
    """Raise when ranks disagree, with who says what."""
    if all(value == values[0] for value in values):
        return
    said: dict[Any, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        said.setdefault(value, []).append(rank)
    text = ", ".join(f"{value} on rank {', '.join(map(str, r))}" for value, r in said.items())
    where = f" in {call}" if call else ""
    raise UsageError(f"{name} must be the same on all ranks{where}, got {text}{advice}")
