"""A comparison on several ranks: whole heads of split calls, and failures that all hear of.

Below the exchange of a Ulysses group a rank has the whole sequence of its own heads; in a ring no
rank has. So for what is replayed, all ranks of a sequence exchange tokens for heads once more,
whatever the layer does: each then has all tokens of its share of the heads. Beside the generation
that takes the memory of one more copy of the rank's own q, k, v and output.

A generation ends on all ranks or on none. A rank that fails says so where the others listen next:
at the handshake before an exchange, or at the one that ends every generation. Where all of them
hear it they fail, too, and go on with what is next. A rank that is in the middle of an exchange
cannot listen: nobody can take it out of there but by ending the run. Then the rank at fault writes
down whose failure it was, so that the run can be started again without it.

Shapes: B batch, S tokens, H query heads, h heads of a rank, D head size.
"""

import json
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from multimodal_gen.errors import MultimodalGenError, RankError, UsageError
from multimodal_gen.runtime.distributed.collectives import HeadPartition, Span, scatter_heads
from multimodal_gen.runtime.distributed.collectives import partition_heads as dealt
from multimodal_gen.runtime.distributed.faults import follows_from_another
from multimodal_gen.runtime.distributed.groups import (
    Group,
    HandshakeState,
    ParallelGroups,
    broadcast_object,
    parallel_groups,
)
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import Rows, SplitCall

_ResultT = TypeVar("_ResultT")

# How long a device may take for what is queued when a generation fails.
_STUCK_S = 10.0
# How long a rank that failed waits for the others to notice, and one that is done for the others.
_HEARD_S = 15.0
_DONE_S = 3600.0
_POLL_S = 0.02
_END = "the end of a generation"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadShare:
    """What a rank has of a call: all tokens of some heads.

    Attributes:
        call: the call; [B, S, h, D] each, `first_head` is the first of them.
        out: what the layer made of them.
    """

    call: AttentionCall
    out: torch.Tensor


def share_of_heads(layer: AttentionLayer, call: AttentionCall, out: torch.Tensor) -> HeadShare:
    """Return all tokens of this rank's share of the heads; every rank of a sequence has to ask.

    Without several ranks that share the tokens of the call it is all of it.

    Args:
        layer: whose call it is.
        call: the call, as the layer gets it, with the tokens of this rank.
        out: what the layer returned.

    Raises:
        RankError: another rank does not ask, or fails.
    """
    groups = parallel_groups()
    if groups is None or groups.sequence.size == 1 or not call.exchange:
        return HeadShare(call=call, out=out)
    rows = Rows.of(call.query, call.key, call.replicated)
    facts = {"shape": f"{[*call.query.shape[2:]]}, {[*call.key.shape[2:]]}"}
    counts = handshake(groups, f"replaying {layer.site.name}", facts, (rows.query, rows.key))
    lengths, key_lengths = (tuple(count[i] for count in counts) for i in range(2))
    split = SplitCall(
        # The exchange is that of Ulysses, among all ranks of the sequence.
        groups=replace(groups, ulysses=groups.sequence, ring=_alone(groups)),
        shares=_shares(call.query.shape[2], call.key.shape[2], groups.sequence.size),
        rows=rows,
        lengths=lengths,
        key_lengths=key_lengths,
    )
    gate = call.gate
    if gate is None and call.spare_gate is not None:
        gate = call.spare_gate()
    q, k, v, gate = split.joined(*split.take_heads(call._replace(gate=gate)))
    whole = AttentionCall(
        q,
        k,
        v,
        split.whole_mask(call),
        replicated=call.replicated,
        some_heads=True,
        no_grid=call.no_grid,
        first_head=split.heads[0],
        spare_gate=None if gate is None else partial(_itself, gate),
    )
    return HeadShare(call=whole, out=_heads_of(split, out))


def _itself(gate: torch.Tensor) -> torch.Tensor:
    return gate


def _heads_of(split: SplitCall, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's heads of what has the tokens of its queries."""
    rows, heads = split.rows, slice(*split.heads)
    front, tokens, back = torch.split(x, [rows.prefix, rows.query, rows.suffix], dim=1)
    (tokens,) = scatter_heads([tokens], [split.shares.queries], split.lengths, split.groups.ulysses)
    return torch.cat((front[:, :, heads], tokens, back[:, :, heads]), dim=1)


def _shares(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadPartition:
    """Deal heads out to ranks; the last ones get none where there are fewer heads, as in a ring."""
    if num_heads >= num_ranks:
        return dealt(num_heads, num_kv_heads, num_ranks)
    group = num_heads // num_kv_heads
    queries: list[Span] = [
        (min(rank, num_heads), min(rank + 1, num_heads)) for rank in range(num_ranks)
    ]
    keys = tuple((start // group, (stop - 1) // group + 1) for start, stop in queries)
    return HeadPartition(
        num_heads=num_heads, num_kv_heads=num_kv_heads, queries=tuple(queries), keys=keys
    )


def _alone(groups: ParallelGroups) -> Group:
    return Group(ranks=(groups.rank,), index=0, handle=None)


class GenerationError(UsageError):
    """A generation failed on a rank, and so on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult(Generic[_ResultT]):
    """What a generation gave on one rank.

    Attributes:
        result: what it gave.
        cfg: index of the rank among those of the guidance branches.
        place: its index among those that share the sequence.
    """

    result: _ResultT
    cfg: int = 0
    place: int = 0


def said_by_main(value: _ResultT) -> _ResultT:
    """Return what the first rank passes; on one device, what is passed."""
    if parallel_groups() is None:
        return value
    said: _ResultT = broadcast_object(value)
    return said


class Ranks:
    """The ranks of a comparison, as they end their generations together; every rank makes one.

    Args:
        device: where this rank computes.
        describe: says in a line why a generation failed.
    """

    def __init__(self, device: torch.device, describe: Callable[[BaseException], str]) -> None:
        self._device, self._describe = device, describe
        self._ends: _Ends | None = None
        if parallel_groups() is not None:
            self._ends = _Ends(said_by_main(uuid.uuid4().hex))

    def settle(
        self, work: Callable[[], _ResultT], when_fatal: Callable[[str], object] | None = None
    ) -> tuple[RankResult[_ResultT], ...]:
        """Return what a generation gives on every rank, by guidance branch and place in sequence.

        Every rank has to call this. On one device it is what `work` gives.

        Args:
            work: makes the generation.
            when_fatal: gets why it failed here, before that ends the run.

        Raises:
            GenerationError: it failed on a rank; raised on all of them, with the same words.
            RankError: it failed on a rank while another waited for it where it could not hear.
        """
        groups = parallel_groups()
        if groups is None or self._ends is None:
            return (RankResult(result=work()),)
        failure: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failure = _closed(groups, failure)
        said = "" if failure is None else self._describe(failure)
        own = failure is not None and not follows_from_another(failure)
        stuck = failure is not None and not _becomes_idle(self._device)
        everyone = self._ends.wait_for_all(_End(said=said, own=own, stuck=stuck))
        if everyone is None:
            if own and when_fatal is not None:
                when_fatal(said)
            raise RankError(
                f"{said or 'a generation failed on another rank'}; other ranks could not be told, "
                f"so that the comparison ends here: what is done is kept, go on with --resume"
            ) from failure
        _raise_failures(everyone)
        mine = (groups.cfg.index, groups.sequence.index, result)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, mine)
        found = [RankResult(result=each, cfg=cfg, place=place) for cfg, place, each in results]
        return tuple(sorted(found, key=lambda each: (each.cfg, each.place)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a generation ended on a rank.

    Attributes:
        said: why it failed, or "".
        own: that is not another rank's failure, noticed here.
        stuck: the device waits for an exchange that another rank left out.
    """

    said: str
    own: bool
    stuck: bool


class _Ends:
    """How generations end on all ranks, in the store at which they met: it needs no exchange.

    Args:
        name: of this comparison.
    """

    def __init__(self, name: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"comparison/{name}", store)  # type: ignore[attr-defined]
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._count = 0

    def wait_for_all(self, end: _End) -> list[_End] | None:
        """Return how a generation ended on every rank; None where the run cannot go on.

        A rank that failed does not wait for long; one that is done waits for those that are not.
        """
        prefix, store = str(self._count), self._store
        self._count += 1
        store.set(
            f"{prefix}/rank/{self._rank}",
            json.dumps({"said": end.said, "own": end.own, "stuck": end.stuck}),
        )
        if end.stuck:
            self._decide(prefix, "over")
        elif store.add(f"{prefix}/ended", 1) == self._num_ranks:
            self._decide(prefix, "all")
        give_up = time.monotonic() + (_HEARD_S if end.said else _DONE_S)
        while not store.check([f"{prefix}/verdict"]):
            if time.monotonic() > give_up:
                self._decide(prefix, "over")
            time.sleep(_POLL_S)
        if store.get(f"{prefix}/verdict") != b"all":
            return None
        return [
            _End(**json.loads(store.get(f"{prefix}/rank/{rank}")))
            for rank in range(self._num_ranks)
        ]

    def _decide(self, prefix: str, verdict: str) -> None:
        """Say what holds for all ranks, unless another one was first."""
        if self._store.add(f"{prefix}/decided", 1) == 1:
            self._store.set(f"{prefix}/verdict", verdict)


def _raise_failures(everyone: list[_End]) -> None:
    failed = [(rank, end) for rank, end in enumerate(everyone) if end.said]
    if not failed:
        return
    # What only follows from another rank's failure is not why.
    rank, end = next((each for each in failed if each[1].own), failed[0])
    kind, colon, rest = end.said.partition("out of memory: ")
    raise GenerationError(
        f"{kind}{colon}rank {rank}: {rest}" if colon else f"rank {rank}: {end.said}"
    )


def _closed(groups: ParallelGroups, failure: Exception | None) -> Exception | None:
    """End a generation in step with the other ranks; return why it failed, or None.

    In each group of ranks that listen to each other a generation has one last handshake, whether it
    is this one or one before an exchange at which a rank refused to go on.
    """
    branches = replace(groups, control=groups.cfg_control, handshakes=HandshakeState())
    heard = None if failure is None else _refused_by(failure)
    for among in (groups, branches):
        if among.control.size > 1 and among.control is not heard:
            failure = _last_handshake(among, failure)
    return failure


def _last_handshake(groups: ParallelGroups, failure: Exception | None) -> Exception | None:
    if failure is not None:
        with suppress(MultimodalGenError):
            handshake(groups, _END, {}, (), UsageError(str(failure) or type(failure).__name__))
        return failure
    try:
        handshake(groups, _END, {}, ())
    except MultimodalGenError as error:
        return error
    return None


def _refused_by(error: BaseException) -> Group | None:
    """Return the ranks among whom the handshake failed that an error came out of, if any."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is handshake.__code__:
            group: Group = frame.f_locals["groups"].control
            return group
    return None


def _becomes_idle(device: torch.device) -> bool:
    """Whether the device does all that is queued: an exchange that a rank left out never ends."""
    if device.type != "cuda":
        return True
    waits = threading.Thread(target=torch.cuda.synchronize, args=(device,), daemon=True)
    waits.start()
    waits.join(_STUCK_S)
    return not waits.is_alive()
