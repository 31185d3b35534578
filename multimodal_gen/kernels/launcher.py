"""Launches Triton kernels, again without asking Triton every time which compilation fits.

Triton looks at every argument of every launch, which for kernels of many arguments takes longer
than a small attention runs. Here a launch is looked up by what compilations differ in.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["Launch", "Launcher"]

# Integers from here on are passed as 64-bit ones.
_INT32 = 1 << 31
# Products and sums are fused, as all kernels were measured. What Triton does where nobody says it
# differs between releases, and follows the environment.
_FUSED = MappingProxyType({"enable_fp_fusion": True})


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
        self._known: dict[tuple[Any, ...], list[tuple[Any, list[Any]]]] = {}

    def __call__(self, first: tuple[Any, ...], *last: Any) -> None:
        """Launch.

        Args:
            first: arguments before the fixed ones.
            *last: arguments after them.
        """
        launcher, fixed = self._launcher, self._fixed
        key = (*launcher.kinds(first), *launcher.kinds(last, len(first) + len(fixed)))
        known = self._known.get(key)
        arguments = (*first, *fixed, *last)
        if known is not None:
            for run, named in known:
                run(*arguments, *named)
            return
        every = launcher.each(self._grid, *arguments, variants=self._variants)
        if all(compiled is not None for compiled in every):
            grid = (*self._grid, 1, 1)[:3]
            self._known[key] = [
                (compiled[grid], launcher.named(options, len(arguments)))
                for compiled, options in zip(every, self._variants, strict=True)
            ]
