"""Launches Triton kernels, again without asking Triton every time which compilation fits.

Triton looks at every argument of every launch, which for kernels of many arguments takes longer
than a small attention runs. Here a launch is looked up by what compilations differ in. It goes to
the device of its tensors, as those of torch do, where Triton's own go to the current one.
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

# Launches on a grid along three axes with a kernel's first parameters and all others, in its order.
_Run: TypeAlias = Callable[[tuple[int, ...], Sequence[Any], Sequence[Any]], None]

# What one access takes at most.
VECTOR_BYTES = 16
# Integers from here on are passed as 64-bit ones.
_INT32 = 1 << 31
# Products and sums are fused, as all kernels were measured. What Triton does by default
# differs between releases, and follows the environment.
_FUSED = MappingProxyType({"enable_fp_fusion": True})
# Takes launches instead of the GPU; see `rehearsal.Rehearsal`.
REHEARSED: ContextVar[Callable[..., None] | None] = ContextVar(
    "multimodal_gen_rehearsed", default=None
)
# How many tuples of tensor maps a launch keeps, of some 1 KiB a map; see `Direct`.
_MAX_MAPS = 1024


class Launcher:
    """A Triton kernel that remembers its compilations.

    Holds them as long as it lives, like the kernel itself does.

    Args:
        kernel: function under `triton.jit` or `gluon.jit`. Its descriptors may differ from launch
            to launch in their tensors, dtypes and boxes, and in nothing else.

    Attributes:
        kernel: the function.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], _Run] = {}
        params = getattr(kernel, "params", ())  # the interpreter has none
        self._names = tuple(p.name for p in params)
        # Whether compilations depend on the value of an integer, and not just on its width.
        self._by_value = tuple(not p.do_not_specialize for p in params)

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch.

        Args:
            grid: number of programs along each axis.
            *arguments: the kernel's first parameters, in its order.
            **options: its other parameters, known at compile time and hashable, and `num_warps`
                or other options of Triton.
        """
        self.each(grid, *arguments, variants=(options,))

    def each(
        self,
        grid: tuple[int, ...] | list[tuple[int, ...]],
        *arguments: Any,
        variants: Sequence[dict[str, Any]],
    ) -> "list[_Run | None]":
        """Launch once for each of several options, one after another; see `__call__`.

        What is not compiled yet is compiled side by side.

        Args:
            grid: of all, or a list of that of each.
            *arguments: see `__call__`.
            variants: options of each.

        Returns:
            What launches each again, or None where Triton is asked every time, or nothing is
            launched.
        """
        grids = _grid_of_each(grid, variants)
        note = REHEARSED.get()
        if note is not None:
            for each, options in zip(grids, variants, strict=True):
                note(self, each, arguments, {**_FUSED, **options})
            return [None] * len(variants)
        with _device_of(arguments):
            if torch.version.hip is not None or not self._names:
                # Compilations for AMD GPUs differ in more.
                for each, options in zip(grids, variants, strict=True):
                    self.kernel[each](*arguments, **_FUSED, **options)
                return [None] * len(variants)
            kinds = self.kinds(arguments)
            keys = [(*kinds, *options.items()) for options in variants]
            runs = [self._compiled.get(key) for key in keys]
            if runs.count(None) > 1:
                pairs = zip(variants, runs, strict=True)
                new = [options for options, run in pairs if run is None]
                compile_together(self.kernel, grids[0], arguments, new)
            return [
                self._one(key, run, each, arguments, options)
                for key, run, each, options in zip(keys, runs, grids, variants, strict=True)
            ]

    def _one(
        self,
        key: tuple[Any, ...],
        run: _Run | None,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> _Run | None:
        """Launch once, and return what launches it again."""
        if run is not None:
            run(_in_space(grid), arguments, self.named(options, len(arguments)))
            return run
        compiled = self.kernel[grid](*arguments, **_FUSED, **options)
        if compiled is None:
            return None
        run = self._compiled[key] = Direct.of(compiled, arguments) or _plain(compiled)
        return run

    def named(self, options: dict[str, Any], first: int) -> list[Any]:
        """Return the options that are parameters, from the one at place `first` on, in order."""
        return [options[name] for name in self._names[first:]]

    def kinds(self, arguments: Sequence[Any]) -> list[Any]:
        """Return what compilations for such arguments have in common."""
        kinds: list[Any] = []
        for value, by_value in zip(arguments, self._by_value, strict=False):
            # Most are integers, and asking whether something is a tensor takes long.
            kind = type(value)
            if kind is int:
                kinds.append(value if by_value else -_INT32 <= value < _INT32)
            elif kind is float:
                kinds.append(float)
            elif kind is torch.Tensor or isinstance(value, torch.Tensor):
                kinds.append((value.dtype, value.get_device(), value.data_ptr() % 16))
            elif hasattr(value, "block_shape"):
                kinds.append((value.base.dtype, tuple(value.block_shape)))
            else:
                kinds.append(value)
        return kinds


def _grid_of_each(
    grid: tuple[int, ...] | list[tuple[int, ...]], variants: Sequence[object]
) -> list[tuple[int, ...]]:
    return grid if isinstance(grid, list) else [grid] * len(variants)


class Address:
    """What kernels and their descriptors take of a tensor, without holding its memory.

    Args:
        address: of the first element.
        dtype: of the elements.
    """

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


class Form(NamedTuple):
    """What a cached launch depends on of a tensor, and is looked up by.

    Attributes:
        shape: of the tensor.
        strides: in elements.
        dtype: of its elements.
        device: where it lies.
        aligned: whether it begins at a multiple of 16 bytes.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool


def form_of(tensor: torch.Tensor) -> Form:
    """Return what a launch depends on of a tensor."""
    # Not `Form(...)`, which takes longer: this is asked of many tensors of every call.
    form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0)
    return tuple.__new__(Form, form)


def _outer_strides(form: Form) -> list[int]:
    """Strides of B, S and H in elements; 0 where there is one entry, whose stride means nothing."""
    pairs = zip(form.shape[:3], form.strides, strict=False)
    return [0 if n == 1 else stride for n, stride in pairs]


def vector_of(*tensors: Form) -> int:
    """Return how many elements can be moved together: 16 bytes of them where all tensors allow."""
    (_, _, _, size), item = tensors[0].shape, tensors[0].dtype.itemsize
    inner = size == 1 or all(x.strides[3] == 1 for x in tensors)
    if not inner or not all(x.aligned for x in tensors):
        return 1
    strides = [stride for x in tensors for stride in _outer_strides(x)]
    return math.gcd(VECTOR_BYTES // item, size, *strides)


def strides_in_vectors(form: Form, vector: int) -> tuple[int, int, int, int]:
    """Return the strides of B, S and H in vectors, and that of D in elements."""
    b, s, h = (stride // vector for stride in _outer_strides(form))
    return b, s, h, 1 if form.shape[3] == 1 else form.strides[3]


class Launch:
    """Launches of a kernel of which all but the first arguments are the same every time.

    Holds those arguments. The others are of one kind in all calls (`Launcher.kinds`), and on one
    device: that is for the caller to know, and not looked at.

    Args:
        launcher: of the kernel.
        grid: number of programs along each axis, of all launches or a list of that of each.
        fixed: arguments that follow the first ones of every call.
        variants: options of each of the launches, see `Launcher.each`.
    """

    __slots__ = ("_fixed", "_grids", "_known", "_launcher", "_variants")

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, ...] | list[tuple[int, ...]],
        fixed: tuple[Any, ...],
        variants: Sequence[dict[str, Any]],
    ) -> None:
        self._launcher = launcher
        self._grids = [_in_space(each) for each in _grid_of_each(grid, variants)]
        self._fixed = fixed
        self._variants = variants
        # What launches each variant, its grid, and all arguments that are the same every time.
        self._known: list[tuple[_Run, tuple[int, ...], tuple[Any, ...]]] = []

    def __call__(self, first: tuple[Any, ...]) -> None:
        """Launch.

        Args:
            first: arguments before the fixed ones.
        """
        if self._known:
            for run, grid, rest in self._known:
                run(grid, first, rest)
            return
        launcher = self._launcher
        arguments = (*first, *self._fixed)
        every = launcher.each(self._grids, *arguments, variants=self._variants)
        found = [
            (run, grid, (*self._fixed, *launcher.named(options, len(arguments))))
            for run, grid, options in zip(every, self._grids, self._variants, strict=True)
            if run is not None
        ]
        if len(found) == len(every):
            self._known = found


class Direct:
    """A compilation that is launched with less of Triton's own Python, and the same in effect.

    Where a kernel takes descriptors, Triton has the driver make the tensor map of each at every
    launch, which takes longer than all the rest of it. A map says address, sizes and strides
    alone, and models use the same memory in every step: maps are kept here.

    Args:
        compiled: what is launched, on the current device.
        launch: the compilation's launcher, which takes maps in the place of descriptors.
        make: makes the map of a descriptor, and what is passed with it.
        first: place of the first descriptor among the arguments; the others follow it.
        layouts: what the compilation says of each descriptor.
    """

    def __init__(
        self,
        compiled: Any,
        launch: Callable[..., None],
        make: Callable[[Any, Any], list[Any]],
        first: int,
        layouts: Sequence[Any],
    ) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._compiled, self._launch, self._make = compiled, launch, make
        self._first, self._end, self._layouts = first, first + len(layouts), layouts
        self._active, self._hooks = driver.active, knobs.runtime
        self._device = self._active.get_current_device()
        self._maps: dict[tuple[int, ...], tuple[Sequence[Any], list[Any]]] = {}

    @classmethod
    def of(cls, compiled: Any, arguments: Sequence[Any]) -> "Direct | None":
        """Return launches of a compilation, or None where this Triton launches otherwise.

        Args:
            compiled: what a launch returned.
            arguments: what was launched.
        """
        run = getattr(compiled, "run", None)
        if run is None:
            return None
        from triton import knobs
        from triton.backends.nvidia import driver

        watched = getattr(knobs.runtime, "launch_enter_hook", None)
        if type(run) is not getattr(driver, "CudaLauncher", None) or not hasattr(watched, "calls"):
            return None
        launch, make = copy.copy(run), getattr(driver, "make_tensordesc_arg", None)
        places = [i for i, value in enumerate(arguments) if hasattr(value, "block_shape")]
        if not places or make is None:
            return None if places else cls(compiled, launch, lambda *_: [], 0, ())
        # Triton makes maps in a function around the driver's.
        inside = inspect.getclosurevars(run.launch).nonlocals
        layouts = inside.get("tensordesc_meta") or ()
        if "launcher" not in inside or len(layouts) != len(places) or None in layouts:
            return None
        if places != list(range(places[0], places[0] + len(places))):
            return None
        launch.launch = inside["launcher"]
        # Releases from 3.8 on pass one more, which other GPUs ask for.
        more = (None,) * (len(inspect.signature(make).parameters) - 2)
        return cls(
            compiled,
            launch,
            lambda descriptor, layout: make(descriptor, layout, *more),
            places[0],
            tuple(layouts),
        )

    def __call__(
        self, grid: tuple[int, ...], first: Sequence[Any], rest: Sequence[Any] = ()
    ) -> None:
        """Launch; a descriptor that is the same object stands for the same memory.

        Args:
            grid: number of programs along three axes.
            first: the first arguments, all descriptors among them.
            rest: the other arguments.
        """
        device = self._active.get_current_device()
        if device != self._device:
            with torch.cuda.device(self._device):
                self(grid, first, rest)
            return
        if self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            self._compiled[grid](*first, *rest)  # profilers are told in Triton's own words
            return
        passed = first
        if self._layouts:
            maps = self._mapped(first[self._first : self._end])
            passed = (*first[: self._first], *maps, *first[self._end :])
        stream = self._active.get_current_stream(device)
        compiled = self._compiled
        function, metadata = compiled.function, compiled.packed_metadata
        self._launch(*grid, stream, function, metadata, None, None, None, *passed, *rest)

    def _mapped(self, descriptors: Sequence[Any]) -> list[Any]:
        """Return what is passed in the place of descriptors."""
        key = tuple(map(id, descriptors))
        known = self._maps.get(key)
        if known is not None:
            return known[1]
        pairs = zip(descriptors, self._layouts, strict=True)
        maps = [part for descriptor, layout in pairs for part in self._make(descriptor, layout)]
        if any(isinstance(descriptor.base, torch.Tensor) for descriptor in descriptors):
            return maps  # what is kept would hold their memory
        if len(self._maps) >= _MAX_MAPS:
            self._maps.clear()
        # With the descriptors, so that no other ones get their ids.
        self._maps[key] = descriptors, maps
        return maps


@cache
def load_triton_early() -> Future[str] | None:
    """Import Triton, and have it hash itself in a thread, for which the first launch waits.

    What Triton caches has the hash of its own files, some 400 MB, in its name; it computes the hash
    once per process, for which Python runs on. It is not imported in the thread: two threads that
    import its parts at a time, each waiting for the other, can leave it half imported for good.

    Returns:
        The hash to come, the same for all callers; None where Triton does not import. What either
        raises, the first launch raises again.
    """
    try:
        from triton.runtime.cache import triton_key
    except Exception:
        return None
    return ThreadPoolExecutor(1, "hash-triton").submit(triton_key)


def compile_together(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    variants: Sequence[dict[str, Any]],
) -> None:
    """Compile a kernel for several options in threads, which compilers hold up little.

    Most of their time is the compiler's and ptxas', in which Python runs on.

    Args:
        kernel: function under `triton.jit` or `gluon.jit`.
        grid: of the launch.
        arguments: the kernel's first parameters.
        variants: options of each; see `Launcher.each`.
    """
    import triton

    in_threads = getattr(triton, "AsyncCompileMode", None)
    if in_threads is None:  # releases before it compile each where it is launched
        return
    # What does not compile raises where it is launched.
    with ThreadPoolExecutor(len(variants)) as pool, in_threads(pool, ignore_errors=True):
        for options in variants:
            kernel.warmup(*arguments, grid=grid, **_FUSED, **options)


def _plain(compiled: Any) -> _Run:
    """Return launches of a compilation by Triton's own Python."""

    def run(grid: tuple[int, ...], first: Sequence[Any], rest: Sequence[Any]) -> None:
        with _device_of((*first, *rest)):
            compiled[grid](*first, *rest)

    return run


def _device_of(arguments: Sequence[Any]) -> AbstractContextManager[Any]:
    """Let launches go to where the tensors lie, which need not be the current device."""
    tensor = next((x for x in arguments if isinstance(x, torch.Tensor)), None)
    if tensor is None:
        return nullcontext()
    device: AbstractContextManager[Any] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return device


def _in_space(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return a grid along three axes."""
    return (*grid, 1, 1)[:3]
