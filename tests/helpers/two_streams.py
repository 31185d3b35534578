"""Calls that a GPU runs on two streams, watched on the CPU: what one makes, no other may touch.

On a GPU such calls run at once, and nothing but `run_on_two_streams` orders them: all come after
what the current stream did before, and before what it does next. Here they run one after another,
so that a result is right whatever one reads of another; but of every byte it is known which of
them wrote it last and which have read it. To read what another one wrote is an error, and so is to
write what another one may read still. What the host waits for is there for all.

Memory belongs to the stream that it was allocated on, which may give it to somebody else as soon as
the host lets go of it. So a call on the other stream may not touch it in a later run, either.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from multimodal_gen.kernels import static_cache
from multimodal_gen.kernels.block_sparse import plan
from multimodal_gen.runtime.layers.attention.sparse import pattern, tiles
from multimodal_gen.runtime.layers.attention.sparse.executors import groups
from multimodal_gen.runtime.layers.attention.sparse.methods import svg2

_aten = torch.ops.aten
# They write to what they are given without reading it, and the former to parts that they choose.
_PARTLY = {
    _aten.index_copy_.default,
    _aten.index_put_.default,
    _aten.scatter_.src,
    _aten.scatter_.value,
}
_WHOLLY = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_SEVERAL = 255

Writes = Literal["", "wholly", "partly"]


class _Touch(NamedTuple):
    """What a call does to a part of some memory.

    Attributes:
        call: which one, from 1 on.
        reads: whether it reads it.
        writes: whether it writes it; or parts of it, maybe beside what others wrote.
        shape: sizes of the part.
        strides: of the part, like its offset in elements.
        offset: where it begins.
        dtype: of its elements.
    """

    call: int
    reads: bool
    writes: Writes
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def bytes_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of what is known of each byte."""
        each = self.dtype.itemsize
        sizes = (n if step else 1 for n, step in zip(self.shape, self.strides, strict=True))
        strides = (each * step for step in self.strides)
        return x.as_strided((*sizes, each), (*strides, 1), each * self.offset)


class _Memory:
    """Some memory, and what the calls of the running run have done to it.

    Args:
        storage: it, which is held: no other takes its place.
        stream: it was allocated on; None for the current one.
    """

    def __init__(self, storage: torch.UntypedStorage, stream: int | None) -> None:
        self.storage, self.stream = storage, stream
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._calls: set[int] = set()
        self._seen: set[_Touch] = set()  # which change nothing once more
        # To be looked at once another call comes, with what does it.
        self._waiting: list[tuple[_Touch, object]] = []
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None

    def wait(self, call: int) -> None:
        """Let others read what a call has written."""
        self._look()
        assert self._known is not None
        written, _ = self._known
        written[written == call] = 0
        self._seen.clear()

    def touch(self, x: torch.Tensor, call: int, reads: bool, writes: Writes, by: object) -> None:
        """Note what a call does to a tensor here; raise where another one is in its way."""
        each = _Touch(call, reads, writes, x.shape, x.stride(), x.storage_offset(), x.dtype)
        if each in self._seen:
            return
        self._seen.add(each)
        self._calls.add(call)
        self._waiting.append((each, by))
        if len(self._calls) > 1:
            self._look()

    def _look(self) -> None:
        if self._known is None:
            nothing = torch.zeros(self.storage.nbytes(), dtype=torch.uint8)
            self._known = nothing, nothing.clone()
        for each, by in self._waiting:
            call, reads, writes, *_ = each
            what = _told(each, by)
            # Which call wrote each byte last, and which has read it; 0 for none.
            written, read = (each.bytes_of(known) for known in self._known)
            others = [bool(((of != 0) & (of != call)).any()) for of in (written, read)]
            assert not (others[0] and reads), f"call {call} reads what another wrote: {what}"
            assert not (others[1] and writes), f"call {call} writes what another reads: {what}"
            apart = writes != "wholly" or not others[0]
            assert apart, f"call {call} writes what another wrote: {what}"
            if reads:
                read.copy_(torch.where((read == 0) | (read == call), call, _SEVERAL))
            if writes:
                written.fill_(call)
        self._waiting.clear()


class TwoStreams(TorchDispatchMode):
    """Watches the calls of `run`, which stands in for `run_on_two_streams`.

    Attributes:
        runs: how many calls each run had that would be on two streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []
        self._call = 0  # the running one, from 1 on
        self._known: dict[int, _Memory] = {}

    def run(
        self,
        calls: Sequence[Callable[[], None]],
        device: torch.device,
        *,
        recorded: bool = False,
    ) -> None:
        """Run independent calls one after another, and raise where one touches another's."""
        del device
        if recorded or len(calls) < 2:
            for call in calls:
                call()
            return
        self.runs.append(len(calls))
        try:
            for number, call in enumerate(calls):
                self._call = number + 1
                with self:
                    call()
                self._drop()
        finally:
            for known in self._known.values():
                known.forget()

    def wait(self, *made: object) -> None:
        """What the running call wrote is there for every other."""
        with _disable_current_modes():
            for known in self._known.values():
                known.wait(self._call)
                known.stream = None

    def record(self, *tensors: torch.Tensor) -> None:
        """Stand in for `record_on_current_stream`."""
        for x in tensors:
            known = self._known.get(x.untyped_storage()._cdata)
            if known is not None:
                known.stream = None

    def _drop(self) -> None:
        """Forget memory that nobody else holds."""
        uses = torch._C._storage_Use_Count
        left = ((key, known) for key, known in self._known.items() if uses(key) > 1)
        self._known = dict(left)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        given = kwargs or {}
        touches, makes = _touches(function)
        for at, name, reads, writes in touches:
            value = args[at] if at < len(args) else given.get(name)
            for x in _tensors(value):
                self._touch(x, function, reads=reads, writes=writes)
        made = function(*args, **given)
        if makes:
            for x in _tensors(made):
                self._touch(x, function, writes="wholly", new=True)
        return made

    def _touch(
        self,
        x: torch.Tensor,
        function: Any,
        *,
        reads: bool = False,
        writes: Writes = "",
        new: bool = False,
    ) -> None:
        storage, here = x.untyped_storage(), self._call % 2
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = _Memory(storage, here if new else None)
        known.touch(x, self._call, reads, writes, function)
        if known.stream not in (None, here):
            raise AssertionError(
                f"call {self._call} reads the other stream's: {_told(x, function)}"
            )


@cache
def _touches(function: Any) -> tuple[list[tuple[int, str, bool, Writes]], bool]:
    """Return what an operator does to its arguments, and whether it makes what it returns.

    Of each argument that it touches: its place and name, whether it is read, and how it is written.
    """
    schema, found = function._schema, list[tuple[int, str, bool, Writes]]()
    views = any(x.alias_info and not x.alias_info.is_write for x in schema.returns)
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            only = argument.kwarg_only or function in _PARTLY | _WHOLLY
            found.append(
                (at, argument.name, not only, "partly" if function in _PARTLY else "wholly")
            )
        elif not views:
            found.append((at, argument.name, True, ""))
    return found, not views and not schema.is_mutable


def _told(x: torch.Tensor | _Touch, by: object) -> str:
    return f"{by} of {x.dtype} {list(x.shape)}"


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors with memory in what an operator takes or gives."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided and value.numel() else []
    return [x for each in value for x in _tensors(each)] if type(value) in (list, tuple) else []


def watch_two_streams(patch: pytest.MonkeyPatch) -> TwoStreams:
    """Have every key head be a call of its own, and return what watches them until `patch` ends.

    Nothing is left of plans that were made before.
    """
    watched = TwoStreams()
    for module in (tiles, groups, svg2):
        patch.setattr(module, "run_on_two_streams", watched.run)
    patch.setattr(svg2, "record_on_current_stream", watched.record)
    for module in (static_cache, plan):
        patch.setattr(module, "wait_for_devices", watched.wait)
    patch.setattr(tiles, "_BYTES_AT_ONCE", 1)
    patch.setattr(tiles, "_BYTES_IN_TWO", 0)
    patch.setattr(tiles, "_SHARE_AT_ONCE", 0.0)
    for cached in (pattern.shard_plan, tiles.shard_of, tiles.tiled_video):
        cached.cache_clear()  # type: ignore[attr-defined]
    return watched
