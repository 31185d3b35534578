"""Launches Triton kernels, again without asking Triton every time which compilation fits.

Triton looks at every argument of every launch, which for kernels of many arguments takes longer
than a small attention runs. Here a launch is looked up by what compilations differ in.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["Launch", "Launcher", "mapped_launches"]

# Integers from here on are passed as 64-bit ones.
_INT32 = 1 << 31
# Products and sums are fused, as all kernels were measured. What Triton does where nobody says it
# differs between releases, and follows the environment.
_FUSED = MappingProxyType({"enable_fp_fusion": True})
# Tensor maps that a launch keeps, of some 1 KiB each; see `_Mapped`.
_MAX_MAPS = 1024


class Launcher:
    """A Triton kernel that remembers its compilations.

    Holds them as long as it lives, like the kernel itself does.

    Args:
        kernel: function under `triton.jit` or `gluon.jit`. Its descriptors may differ from launch
            to launch in their tensors, dtypes and boxes, and in nothing else.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
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
        self, grid: tuple[int, ...], *arguments: Any, variants: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Launch once for each of several options, one after another; see `__call__`.

        Returns:
            What each was compiled to, or None where Triton is asked every time.
        """
        if torch.version.hip is not None or not self._names:
            # Compilations for AMD GPUs differ in more.
            for options in variants:
                self._kernel[grid](*arguments, **_FUSED, **options)
            return [None] * len(variants)
        kinds = self.kinds(arguments)
        found = []
        for options in variants:
            key = (*kinds, *options.items())
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._kernel[grid](*arguments, **_FUSED, **options)
                if compiled is not None:
                    self._compiled[key] = compiled
            else:
                compiled[(*grid, 1, 1)[:3]](*arguments, *self.named(options, len(arguments)))
            found.append(compiled)
        return found

    def named(self, options: dict[str, Any], first: int) -> list[Any]:
        """Return the options that are parameters, from the one at place `first` on, in order."""
        return [options[name] for name in self._names[first:]]

    def kinds(self, arguments: Sequence[Any], first: int = 0) -> list[Any]:
        """Return what compilations for such arguments, from place `first` on, have in common."""
        kinds: list[Any] = []
        for value, by_value in zip(arguments, self._by_value[first:], strict=False):
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


class Launch:
    """Launches of a kernel of which all but a few arguments are the same every time.

    Holds those arguments, and looks at the others only.

    Args:
        launcher: of the kernel.
        grid: number of programs along each axis.
        fixed: arguments that follow the first ones of every call.
        variants: options of each of the launches, see `Launcher.each`.
    """

    __slots__ = ("_fixed", "_grid", "_known", "_launcher", "_variants")

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, ...],
        fixed: tuple[Any, ...],
        variants: Sequence[dict[str, Any]],
    ) -> None:
        self._launcher = launcher
        self._grid = grid
        self._fixed = fixed
        self._variants = variants
        self._known: dict[tuple[Any, ...], list[tuple[Callable[..., None], list[Any]]]] = {}

    def __call__(self, first: tuple[Any, ...], *last: Any) -> None:
        """Launch.

        Args:
            first: arguments before the fixed ones. A descriptor that is the same object stands for
                the same memory.
            *last: arguments after them.
        """
        launcher, fixed = self._launcher, self._fixed
        key = (*launcher.kinds(first), *launcher.kinds(last, len(first) + len(fixed)))
        known = self._known.get(key)
        if known is not None:
            for run, named in known:
                run(*first, *fixed, *last, *named)
            return
        arguments = (*first, *fixed, *last)
        every = launcher.each(self._grid, *arguments, variants=self._variants)
        if all(compiled is not None for compiled in every):
            grid = (*self._grid, 1, 1)[:3]
            self._known[key] = [
                (
                    mapped_launches(compiled, grid, arguments) or compiled[grid],
                    launcher.named(options, len(arguments)),
                )
                for compiled, options in zip(every, self._variants, strict=True)
            ]


class _Mapped:
    """A compilation on a grid, whose launches make the tensor map of a descriptor once.

    Triton has the driver make the map of every descriptor at every launch, which takes longer than
    all the rest of it. A map says address, sizes and strides alone, and models use the same memory
    in every step.

    Args:
        compiled: what is launched.
        grid: number of programs along three axes.
        launch: the compilation's launcher, which takes maps in the place of descriptors.
        make: makes the map of a descriptor, and what is passed with it.
        layouts: place of a descriptor among the arguments, and what the compilation says of it.
    """

    __slots__ = ("_active", "_compiled", "_grid", "_launch", "_layouts", "_make", "_maps", "_plain")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        launch: Callable[..., None],
        make: Callable[[Any, Any], list[Any]],
        layouts: Sequence[tuple[int, Any]],
    ) -> None:
        from triton.runtime import driver

        self._compiled, self._grid, self._plain = compiled, grid, compiled[grid]
        self._launch, self._make, self._layouts = launch, make, layouts
        self._active = driver.active
        self._maps: dict[tuple[int, int], tuple[Any, list[Any]]] = {}

    def __call__(self, *arguments: Any) -> None:
        """Launch; a descriptor that is the same object stands for the same memory."""
        if _launches_are_watched():
            self._plain(*arguments)  # profilers are told of launches in Triton's own words
            return
        passed: list[Any] = []
        done = 0
        for place, layout in self._layouts:
            passed += arguments[done:place]
            done = place + 1
            descriptor = arguments[place]
            key = place, id(descriptor)
            known = self._maps.get(key)
            if known is None:
                if len(self._maps) >= _MAX_MAPS:
                    self._maps.clear()
                # With the descriptor, so that no other one gets its id.
                known = self._maps[key] = descriptor, self._make(descriptor, layout)
            passed += known[1]
        stream = self._active.get_current_stream(self._active.get_current_device())
        self._launch(
            *self._grid, stream, self._compiled.function, self._compiled.packed_metadata,
            None, None, None, *passed, *arguments[done:],
        )  # fmt: skip


def mapped_launches(
    compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]
) -> _Mapped | None:
    """Return launches that keep tensor maps, or None where this Triton makes them elsewhere."""
    places = [i for i, value in enumerate(arguments) if hasattr(value, "block_shape")]
    wrapped: Any = getattr(getattr(compiled, "run", None), "launch", None)
    if not places or getattr(wrapped, "__closure__", None) is None:
        return None
    from triton.backends.nvidia import driver

    inside = inspect.getclosurevars(wrapped).nonlocals
    layouts = inside.get("tensordesc_meta") or ()
    make = getattr(driver, "make_tensordesc_arg", None)
    if "launcher" not in inside or make is None or len(layouts) != len(places) or None in layouts:
        return None
    launch = copy.copy(compiled.run)
    launch.launch = inside["launcher"]  # without the step that makes maps
    # Releases from 3.8 on pass one more, which other GPUs ask for.
    more = (None,) * (len(inspect.signature(make).parameters) - 2)
    return _Mapped(
        compiled,
        grid,
        launch,
        lambda descriptor, layout: make(descriptor, layout, *more),
        tuple(zip(places, layouts, strict=True)),
    )


def _launches_are_watched() -> bool:
    from triton import knobs

    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
