"""What calls would launch, found without a kernel, data or memory of the GPU.

In a `Rehearsal` tensors of a GPU have sizes and addresses alone: they lie on "meta", and say that
they lie on the GPU. Everything that decides about kernels is as in a real call, since none of it
waits for the device. Launches are noted where they would be made.

What was computed on the CPU and moved, such as lists of blocks of a fixed pattern, is kept there
too, for those who read it back.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from multimodal_gen.kernels.launch.launcher import REHEARSED, Address, Launcher

_T = torch.Tensor
_HELD = "_multimodal_gen_held"
# Of more elements nothing is kept on the CPU.
_MOST_HELD = 1 << 22
_ADDRESS = 1 << 20
# What these make depends on nothing.
_UNDEFINED = ("empty", "rand", "normal")
_READ = frozenset((_T.cpu, _T.item, _T.tolist, _T.numpy, _T.__bool__, _T.__int__, _T.__float__))


class Noted(NamedTuple):
    """A launch that was not made.

    Attributes:
        kernel: the function under `triton.jit` or `gluon.jit`.
        grid: number of programs along each axis.
        arguments: the kernel's first parameters, with an `Address` in the place of each tensor.
        options: its other parameters, and those of Triton.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__).strip("_")


class Rehearsal(TorchFunctionMode):
    """Notes launches of the calls in its `with` block, and makes none.

    It is for a process of its own: what the package caches meanwhile has no data either.

    Args:
        index: of the GPU, whose properties decide which kernels are taken.

    Attributes:
        noted: the launches, one for each compilation, in the order in which they were met.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        device = torch.device("cuda", index)
        self.noted: dict[tuple[Any, ...], Noted] = {}
        # What descriptors of attributes return differs from access to access, and is equal.
        self._answers: dict[Any, Callable[..., Any]] = {
            _T.device.__get__: lambda x: device,
            _T.is_cuda.__get__: lambda x: True,  # type: ignore[attr-defined]
            _T.is_meta.__get__: lambda x: False,  # type: ignore[attr-defined]
            _T.get_device: lambda x: index,
            _T.data_ptr: lambda x: _ADDRESS + x.storage_offset() * x.element_size(),
            _T.record_stream: lambda x, stream: None,
        }

    def __enter__(self) -> "Rehearsal":
        self._token = REHEARSED.set(self._note)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        REHEARSED.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer for the GPU, or compute sizes, and data where all of it is known."""
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        first = args[0] if args else None
        if isinstance(first, torch.Tensor):
            if first.is_meta and func in self._answers:
                return self._answers[func](*args)
            if func is _T.copy_ and not first.is_meta and _unknown(args[1]):
                return first.zero_()  # what a kernel would say of the data
            if hasattr(first, _HELD) and _is_read(func, args, kwargs):
                return func(getattr(first, _HELD), *args[1:], **kwargs)
        if func is torch.device or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        given = tree_map(_off_gpu, (args, kwargs))
        leaves = tree_leaves(given)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        on_gpu = _Gpu in leaves or any(x.is_meta for x in tensors)
        return _computed(func, given, tensors) if on_gpu else func(*args, **kwargs)

    def _note(
        self,
        launcher: Launcher,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Note a launch, unless one of the same compilation was."""
        pointers = tuple(
            Address(x.data_ptr(), x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments
        )
        kinds = map(_specialised, launcher.kinds(arguments), arguments, launcher.kernel.params)
        noted = Noted(launcher.kernel, grid, pointers, options)
        self.noted.setdefault((noted.name, *kinds, *options.items()), noted)


def _specialised(kind: Any, value: Any, parameter: Any) -> Any:
    """Return what compilations differ in, of what launches are looked up by.

    Triton tells whole numbers apart by whether they are 1, multiples of 16, and of 32 bits, and
    tensors by where they begin, both unless a kernel says otherwise.
    """
    if type(value) is int and type(kind) is int:
        return value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31
    if isinstance(value, torch.Tensor) and parameter.do_not_specialize_on_alignment:
        return value.dtype
    return kind


def _computed(func: Any, given: tuple[Any, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Return what a function of torch gives on the GPU: sizes, and data where all of it is known.

    Args:
        func: the function.
        given: its arguments, in which `_Gpu` stands for the GPU.
        tensors: those among them.
    """
    name = str(getattr(func, "__name__", ""))
    known = not any(map(_unknown, tensors)) and not any(word in name for word in _UNDEFINED)
    try:
        args, kwargs = tree_map(_on_meta, given)
        made = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError):  # of sizes that data decide
        if func is _T.__getitem__ and not known and _selects(given[0][1]):
            rows = getattr(given[0][1], _HELD).nonzero(as_tuple=True)
            return func(given[0][0], tuple(_on_meta(x) for x in rows))
        if not known:
            raise
        args, kwargs = tree_map(_on_cpu, given)
        found = func(*args, **kwargs)
        stays = tensors and not tensors[0].is_meta and _Gpu not in tree_leaves(given)
        return found if stays else tree_map(_moved, found)
    outs = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
    if known and sum(x.numel() for x in outs) <= _MOST_HELD:
        args, kwargs = tree_map(_on_cpu, given)
        for x, value in zip(outs, tree_leaves(func(*args, **kwargs)), strict=False):
            if x.is_meta:
                setattr(x, _HELD, value)
    else:
        for x in (*outs, *(tensors[:1] if _changes(name) else ())):
            x.__dict__.pop(_HELD, None)
    return made


def _changes(name: str) -> bool:
    """Whether a function of torch writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_gpu(x: object) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (
        isinstance(x, str) and x.partition(":")[0] == "cuda"
    )


def _is_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch brings a tensor's data to the host."""
    if func is not _T.to:
        return func in _READ
    places = [x for x in (*args, *kwargs.values()) if isinstance(x, (str, torch.device))]
    return any(torch.device(x).type == "cpu" for x in places)


def _selects(x: object) -> bool:
    """Whether an index is a mask of which it is known what it selects."""
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool and hasattr(x, _HELD)


def _unknown(x: torch.Tensor) -> bool:
    return x.is_meta and not hasattr(x, _HELD)


class _Gpu:
    """Stands where an argument named the GPU."""


def _off_gpu(x: Any) -> Any:
    return _Gpu if _is_gpu(x) else x


def _on_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and not x.is_meta:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return "meta" if x is _Gpu else x


def _moved(x: Any) -> Any:
    """Return what was computed on the CPU as a tensor of the GPU that is known."""
    if not isinstance(x, torch.Tensor):
        return x
    moved: torch.Tensor = _on_meta(x)
    setattr(moved, _HELD, x)
    return moved


def _on_cpu(x: Any) -> Any:
    if x is _Gpu:
        return "cpu"
    return getattr(x, _HELD, x) if isinstance(x, torch.Tensor) else x
