"""A handshake before every exchange: ranks compare what they are about to do.

Ranks that disagree (a mask here, none there; other shapes) would wait for each other for ever, or
read each other's numbers as something else. Instead all of them raise, within a bounded time.

Every call sends one message, on the CPU, in a group of its own. The first call of a kind waits for
the messages of the others, as do all calls whose data is on the CPU. Later ones on an accelerator
do not: what comes is looked at in the next call, while the exchange is still queued or stuck.

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

from multimodal_gen.errors import MultimodalGenError, RankError, UsageError, first_line
from multimodal_gen.runtime.distributed.groups import Group, ParallelGroups

_MESSAGE_BYTES = 4096
# Behind them a message has its `Progress`, which changes where the rest of it does not.
_PROGRESS = struct.Struct("=3q")
_UNKNOWN = -1
_PROGRESS_NAMES = ("denoising step", "denoiser call", "number of exchanges in this denoiser call")
# What a refusal may take of them in UTF-8; JSON spells a control character with six bytes.
_REFUSAL_BYTES = 600
_SKIPPED = "; a rank left a call out, and all have to make the same ones"
# Kinds of calls to remember, each with a message of every rank.
_MOST_KINDS = 1024
# A rank that refuses its own call does not let others wait for long.
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
    progress: Progress | None = None,
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
        progress: how far this rank is, which has to be the same on every rank, too; None where
            nothing tells.
        wait: wait for the others before a call of a known kind, too.

    Raises:
        UsageError: a fact or the progress differs between ranks; raised on all of them.
        RankError: a rank makes another call, refuses, or does not answer in time; or lengths
            changed that a call took for granted.
    """
    state, progress = groups.handshakes, progress or Progress()
    while state.pending:
        error = _error_of(groups, *state.pending.pop())
        if error is not None:
            raise error
    kind = (call, *facts.items(), lengths)
    agreed: _Agreed | None = state.agreed.get(kind)
    if agreed is None or refusal is not None:
        message = _message(call, facts, lengths, refusal)
    else:
        message = agreed.messages[groups.control.index]
    gather = _Gather(groups.control, message + _PROGRESS.pack(*progress), call)
    state.num_sent += 1
    if refusal is not None:
        with contextlib.suppress(RankError):
            gather.wait(_REFUSAL_TIMEOUT)
        raise refusal
    if agreed is not None and not wait:
        state.pending.append((gather, progress, agreed))
        return agreed.lengths
    received = gather.wait()
    if agreed is None or received != agreed.at(progress):
        agreed = _compare_messages(groups.control, received)
        if len(state.agreed) >= _MOST_KINDS:
            # A rank that has forgotten a kind waits for the others; they need not wait for it.
            del state.agreed[next(iter(state.agreed))]
        state.agreed[kind] = agreed
    return agreed.lengths


def pending_error(groups: ParallelGroups) -> MultimodalGenError | None:
    """Return what this rank's next call would raise, as far as is known by now; does not wait.

    A rank never gets there that waits for its device, and that for another which is not coming, or
    which does something else.
    """
    for gather, *expected in tuple(groups.handshakes.pending):
        error = _error_of(groups, gather, *expected) if gather.is_over() else None
        if error is not None:
            return error
    return None


class _Agreed(NamedTuple):
    """What was sent before calls of one kind.

    Attributes:
        messages: those of all ranks, without their `Progress`.
        lengths: the lengths of every rank.
    """

    messages: list[bytes]
    lengths: tuple[tuple[int, ...], ...]

    def at(self, progress: Progress) -> bytes:
        """Return what is received when all ranks send the same again, and are as far."""
        return _PROGRESS.pack(*progress).join((*self.messages, b""))


def _error_of(
    groups: ParallelGroups, gather: "_Gather", progress: Progress, agreed: _Agreed
) -> MultimodalGenError | None:
    """Return why a call of a known kind, which did not wait, should not have been made."""
    try:
        received = gather.wait()
        if received == agreed.at(progress):
            return None
        found = _compare_messages(groups.control, received)
    except MultimodalGenError as error:
        return error
    return RankError(
        f"lengths must be those ranks had in earlier calls of the same kind, {agreed.lengths}, "
        f"got {found.lengths}; pass seq_lens where they change"
    )


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


class _Gather:
    """A message that was sent, and those of all ranks, under way.

    Args:
        group: who takes part.
        message: as long as everybody's.
        call: what it is about, for errors.

    Raises:
        RankError: it could not be sent.
    """

    def __init__(self, group: Group, message: bytes, call: str) -> None:
        self._received = bytearray(len(message) * group.size)
        self._group, self._call = group, call
        self._work: dist.Work | None = None
        if group.handle is None:
            self._received[:] = message
            return
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = [*torch.frombuffer(self._received, dtype=torch.uint8).view(-1, len(message))]
        try:
            self._work = dist.all_gather(received, sent, group=group.handle, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from None

    def wait(self, timeout: timedelta | None = None) -> bytearray:
        """Return what all ranks sent, one after another.

        Raises:
            RankError: not all of them did, in time.
        """
        try:
            if self._work is not None:
                self._work.wait(*([] if timeout is None else [timeout]))
        except RuntimeError as error:
            raise self._lost(error) from None
        return self._received

    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._work is None or self._work.is_completed()

    def _lost(self, error: RuntimeError) -> RankError:
        among, reason = self._group.ranks, first_line(error).partition(". ")[0]
        return RankError(
            f"the other ranks of {list(among)} must make the same call, {self._call}, got no "
            f"answer; look for the first error of another rank ({reason})",
            among,
        )


def _compare_messages(group: Group, received: bytearray) -> _Agreed:
    """Return what every rank sent, or raise where they disagree."""
    size = _MESSAGE_BYTES + _PROGRESS.size
    each = [bytes(received[start : start + size]) for start in range(0, len(received), size)]
    texts = [one[:_MESSAGE_BYTES] for one in each]
    messages: list[dict[str, Any]] = [json.loads(text) for text in texts]
    for rank, message in zip(group.ranks, messages, strict=True):
        if message["refusal"]:
            raise RankError(f"rank {rank} cannot run {message['call']}: {message['refusal']}")
    _compare("call", [message["call"] for message in messages], group)
    call = messages[0]["call"]
    for name in {name: None for message in messages for name in message["facts"]}:
        _compare(name, [message["facts"].get(name) for message in messages], group, call)
    progress = zip(*(_PROGRESS.unpack(one[_MESSAGE_BYTES:]) for one in each), strict=True)
    for name, numbers in zip(_PROGRESS_NAMES, progress, strict=True):
        _compare(name, ["unknown" if n == _UNKNOWN else n for n in numbers], group, call, _SKIPPED)
    return _Agreed(texts, tuple(tuple(message["lengths"]) for message in messages))


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
