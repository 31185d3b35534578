"""A recorder of graphs for the CPU: it keeps the operations of a function and does them again.

As on a GPU, what a recording computed is not there before its first replay, each replay writes the
same tensors, from the memory of the same inputs, and no Python of the function runs in one. What
the host reads in a recording ends it with an error. References of block-sparse attention, which
read as they go, are one operation, as a kernel is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from multimodal_gen.integrations.cuda_graphs import Recorder
from multimodal_gen.integrations.graph_kinds import parts_of
from multimodal_gen.kernels.block_sparse import api as block_sparse
from multimodal_gen.kernels.quantized_attention import api as quantized

_READS = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    }
)


class _Operation(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[torch.Tensor, ...]  # new tensors, which a replay writes

    def again(self) -> None:
        found = self.function(*self.args, **self.kwargs)
        for old, new in zip(self.made, _tensors(found), strict=bool(self.made)):
            old.copy_(new)


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in tree_iter(values) if isinstance(x, torch.Tensor))


class _Recorded(TorchDispatchMode):
    """Keeps operations, which it does as well: the shapes of later ones hang on them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        found = function(*args, **kwargs)
        written, made = function._schema.is_mutable, _tensors(found)
        given = {
            part.untyped_storage()._cdata for x in _tensors((args, kwargs)) for part in parts_of(x)
        }
        # Some that may give a view, as `reshape`, copy instead.
        if written or not all(x.untyped_storage()._cdata in given for x in made):
            made = () if written else made
            self.operations.append(_Operation(function, args, kwargs, made))
        return found

    def as_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts as one operation."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                found = function(*args, **kwargs)
            self.operations.append(_Operation(function, args, kwargs, _tensors(found)))
            return found

        return run


def _as_one(module: Any, name: str, mode: _Recorded) -> Any:
    return mock.patch.object(module, name, mode.as_one(getattr(module, name)))


class _Graph:
    """What was recorded.

    Args:
        operations: one after the other.
        recorder: counts what is freed.
    """

    def __init__(self, operations: list[_Operation], recorder: "type[CpuRecorder]") -> None:
        self._operations = operations
        self._recorder = recorder

    def replay(self) -> None:
        """Do it again."""
        assert self._operations, "it was freed"
        with torch.inference_mode():
            for operation in self._operations:
                operation.again()

    def reset(self) -> None:
        """Free it."""
        self._operations.clear()
        self._recorder.freed += 1


class CpuRecorder(Recorder):
    """Records on the CPU; `recorded` and `freed` count."""

    recorded = 0
    freed = 0

    @staticmethod
    def reason_against(device: torch.device) -> str | None:
        del device
        return None

    def begin(self, device: torch.device) -> None:
        pass

    def num_bytes(self) -> int:
        return 0

    def record(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, _Graph]:
        del device
        mode = _Recorded()
        with (
            mock.patch("torch.cuda.is_initialized", return_value=True),
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
            _as_one(block_sparse, "attention_reference", mode),
            _as_one(quantized, "quantized_reference", mode),
            mode,
        ):
            result = function()
        type(self).recorded += 1
        operations = mode.operations
        with torch.inference_mode():
            for operation in operations:
                for x in operation.made:
                    if x.is_floating_point():
                        x.fill_(float("nan"))

        self._num_graphs += 1
        return result, _Graph(operations, type(self))
