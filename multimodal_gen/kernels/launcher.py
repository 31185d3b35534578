"""Launches Triton kernels, again without asking Triton every time which compilation fits.

Triton looks at every argument of every launch, which for kernels of many arguments takes longer
than a small attention runs. Here a launch is looked up by what compilations differ in.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["Launcher"]

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
    ) -> None:
        """Launch once for each of several options, one after another; see `__call__`."""
        if torch.version.hip is not None or not self._names:
            # Compilations for AMD GPUs differ in more.
            for options in variants:
                self._kernel[grid](*arguments, **_FUSED, **options)
            return
        kinds = self._kinds(arguments)
        for options in variants:
            key = (*kinds, *options.items())
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._kernel[grid](*arguments, **_FUSED, **options)
                if compiled is not None:
                    self._compiled[key] = compiled
            else:
                named = [options[name] for name in self._names[len(arguments) :]]
                compiled[(*grid, 1, 1)[:3]](*arguments, *named)

    def _kinds(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return what compilations for such arguments have in common."""
        kinds: list[Any] = []
        for value, by_value in zip(arguments, self._by_value, strict=False):
            if isinstance(value, torch.Tensor):
                kinds.append((value.dtype, value.get_device(), value.data_ptr() % 16))
            elif type(value) is int:
                kinds.append(value if by_value else -_INT32 <= value < _INT32)
            elif type(value) is float:
                kinds.append(float)
            elif hasattr(value, "block_shape"):
                kinds.append((value.base.dtype, tuple(value.block_shape)))
            else:
                kinds.append(value)
        return kinds
