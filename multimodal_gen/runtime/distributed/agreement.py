"""Ranks tell each other what they are about to exchange, before the first exchange of its kind.

Ranks that disagree (a mask here, none there; other shapes) would wait for each other for ever, or
read each other's numbers as something else. Instead all of them raise, within a bounded time.

The messages travel on the CPU in a group of their own, and only once per kind of call: what was
agreed is remembered. A rank that brings something new to a call that is old news elsewhere waits
for the others in vain and raises after the control group's timeout.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.errors import MultimodalGenError, RankError, UsageError
from multimodal_gen.runtime.distributed.groups import Group, ParallelGroups

__all__ = ["agree"]

_MESSAGE_BYTES = 4096
# A rank that has something to say against its own call lets nobody wait for long.
_REFUSAL_TIMEOUT = timedelta(seconds=5)


def agree(
    groups: ParallelGroups,
    call: str,
    facts: Mapping[str, object],
    length: int,
    refusal: MultimodalGenError | None = None,
) -> tuple[int, ...]:
    """Return `length` of every rank of the sequence, once all of them make the same call.

    Args:
        groups: this process's groups.
        call: what is about to be done, for messages.
        facts: what has to be the same on every rank; compared as text.
        length: what may differ.
        refusal: why this rank cannot make the call, or None. The others are told, then it is
            raised.

    Raises:
        UsageError: a fact differs between ranks; raised on all of them.
        RankError: a rank makes another call, refuses, or does not answer in time.
    """
    kind = (call, *facts.items(), length)
    if refusal is None and kind in groups.agreed:
        return groups.agreed[kind]
    told = _tell(groups.control, call, facts, length, refusal)
    if refusal is not None:
        raise refusal
    for rank, message in zip(groups.control.ranks, told, strict=True):
        if message["refusal"]:
            raise RankError(f"rank {rank} cannot run {call}: {message['refusal']}")
    _compare("call", [message["call"] for message in told], groups.control)
    for name in facts:
        _compare(name, [message["facts"].get(name) for message in told], groups.control, call)
    groups.agreed[kind] = tuple(message["length"] for message in told)
    return groups.agreed[kind]


def _tell(
    group: Group,
    call: str,
    facts: Mapping[str, object],
    length: int,
    refusal: MultimodalGenError | None,
) -> list[dict[str, Any]]:
    """Return the message of every rank; where this one refuses, it need not hear the others."""
    message = {
        "call": call,
        "facts": {name: str(fact) for name, fact in facts.items()},
        "length": length,
        "refusal": str(refusal)[:1000] if refusal else None,
    }
    if group.handle is None:
        return [message]
    text = json.dumps(message).encode()
    assert len(text) <= _MESSAGE_BYTES, "facts are short"
    sent = torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in group.ranks]
    try:
        work = dist.all_gather(received, sent, group=group.handle, async_op=True)
        work.wait(*([_REFUSAL_TIMEOUT] if refusal else []))
    except RuntimeError as error:
        if refusal:
            return []
        raise RankError(
            f"the other ranks of {list(group.ranks)} must make the same call, {call}, got no "
            f"answer; look for the first error of another rank ({error})"
        ) from None
    return [json.loads(bytes(x.tolist())) for x in received]


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
