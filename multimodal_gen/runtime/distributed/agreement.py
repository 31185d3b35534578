"""Ranks tell each other what they are about to exchange.

Ranks that disagree (a mask here, none there; other shapes) would wait for each other for ever, or
read each other's numbers as something else. Instead all of them raise, within a bounded time.

Every call sends one message, on the CPU, in a group of its own. The first call of a kind waits for
the messages of the others, as do all calls whose data is on the CPU. Later ones on an accelerator
do not: what they hear is looked at in the next call, while the exchange is still queued or stuck.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.errors import MultimodalGenError, RankError, UsageError
from multimodal_gen.runtime.distributed.groups import Group, ParallelGroups

__all__ = ["agree"]

_Hearing = Callable[[timedelta | None], list[torch.Tensor]]

_MESSAGE_BYTES = 4096
# What a refusal may take of them in UTF-8; JSON spells a control character with six bytes.
_REFUSAL_BYTES = 600
# A rank that has something to say against its own call lets nobody wait for long.
_REFUSAL_TIMEOUT = timedelta(seconds=5)


def agree(
    groups: ParallelGroups,
    call: str,
    facts: Mapping[str, object],
    lengths: tuple[int, ...],
    refusal: MultimodalGenError | None = None,
    *,
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
        wait: hear the others before a call of a known kind, too.

    Raises:
        UsageError: a fact differs between ranks; raised on all of them.
        RankError: a rank makes another call, refuses, or does not answer in time; or lengths
            changed that a call took for granted.
    """
    _look_at_pending(groups)
    kind = (call, *facts.items(), lengths)
    known = groups.agreed.get(kind)
    sent = known[0] if known and refusal is None else _message(call, facts, lengths, refusal)
    hearing = _tell(groups.control, sent, call)
    if refusal is not None:
        with contextlib.suppress(RankError):
            hearing(_REFUSAL_TIMEOUT)
        raise refusal
    if known and not wait:
        groups.pending.append((hearing, *known[1:]))
        return known[2]
    heard = hearing(None)
    if known and _same(heard, known[1]):
        return known[2]
    agreed = _verdict(groups.control, heard)
    groups.agreed[kind] = (sent, heard, agreed)
    return agreed


def _look_at_pending(groups: ParallelGroups) -> None:
    """Raise when a call that did not wait should not have been made."""
    while groups.pending:
        hearing, known, lengths = groups.pending.pop()
        heard = hearing(None)
        if not _same(heard, known):
            raise RankError(
                f"lengths must be those ranks had in earlier calls of the same kind, {lengths}, "
                f"got {_verdict(groups.control, heard)}; pass seq_lens where they change"
            )


def _same(heard: list[torch.Tensor], known: list[torch.Tensor]) -> bool:
    """Whether all ranks said what they said before; much faster than reading it."""
    return all(torch.equal(x, y) for x, y in zip(heard, known, strict=True))


def _message(
    call: str,
    facts: Mapping[str, object],
    lengths: tuple[int, ...],
    refusal: MultimodalGenError | None,
) -> torch.Tensor:
    message = {
        "call": call,
        "facts": {name: str(fact) for name, fact in facts.items()},
        "lengths": lengths,
        "refusal": _cut(str(refusal)) if refusal else None,
    }
    text = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    assert len(text) <= _MESSAGE_BYTES, "facts are short"
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)


def _cut(text: str) -> str:
    """Return the beginning of `text` that fits into a message, without half a character."""
    # What UTF-8 cannot spell, half of a surrogate pair, is replaced.
    return text.encode(errors="replace")[:_REFUSAL_BYTES].decode(errors="ignore")


def _tell(group: Group, sent: torch.Tensor, call: str) -> _Hearing:
    """Send a message; return what waits for those of all ranks."""
    received = [torch.empty_like(sent) for _ in group.ranks]
    failure = (
        f"the other ranks of {list(group.ranks)} must make the same call, {call}, got no answer; "
        f"look for the first error of another rank"
    )
    work: Any = None
    try:
        if group.handle is not None:
            work = dist.all_gather(received, sent, group=group.handle, async_op=True)
    except RuntimeError as error:
        raise RankError(f"{failure} ({_first_line(error)})") from None

    def hear(timeout: timedelta | None) -> list[torch.Tensor]:
        if work is None:
            return [sent]
        try:
            work.wait(*([] if timeout is None else [timeout]))
        except RuntimeError as error:
            raise RankError(f"{failure} ({_first_line(error)})") from None
        return received

    return hear


def _verdict(group: Group, received: list[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of every rank, or raise where ranks disagree."""
    messages: list[dict[str, Any]] = [json.loads(bytes(x.tolist())) for x in received]
    for rank, message in zip(group.ranks, messages, strict=True):
        if message["refusal"]:
            raise RankError(f"rank {rank} cannot run {message['call']}: {message['refusal']}")
    _compare("call", [message["call"] for message in messages], group)
    call = messages[0]["call"]
    for name in {name: None for message in messages for name in message["facts"]}:
        _compare(name, [message["facts"].get(name) for message in messages], group, call)
    return tuple(tuple(message["lengths"]) for message in messages)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


def _compare(name: str, values: list[Any], group: Group, call: str = "") -> None:
    """Raise when ranks disagree, with who says what."""
    if all(value == values[0] for value in values):
        return
    said: dict[Any, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        said.setdefault(value, []).append(rank)
    text = ", ".join(f"{value} on rank {', '.join(map(str, r))}" for value, r in said.items())
    where = f" in {call}" if call else ""
    raise UsageError(f"{name} must be the same on all ranks{where}, got {text}")
