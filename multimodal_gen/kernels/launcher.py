"""Launches Triton kernels again without asking Triton every time which compilation fits.

Triton looks at every argument of every launch, which for kernels of many arguments takes longer
than a small attention runs. Here a launch is looked up by what compilations differ in.
"""

from typing import Any

import torch

__all__ = ["Launcher"]

# Integers from here on are passed as 64-bit ones.
_INT32 = 1 << 31


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
        params = getattr(kernel, "params", ())
        # Whether compilations depend on the value of an integer, and not just on its width.
        self._by_value = tuple(not p.do_not_specialize for p in params)

    def __call__(
        self, grid: tuple[int, ...], *arguments: Any, last: tuple[Any, ...], num_warps: int
    ) -> None:
        """Launch once for every value of the kernel's last parameter, one after another.

        Args:
            grid: number of programs along each axis.
            *arguments: every other parameter of the kernel in its order.
            last: values of the last parameter, known at compile time and hashable.
            num_warps: warps of a program.
        """
        if torch.version.hip is not None or len(self._by_value) != len(arguments) + 1:
            # Compilations for AMD GPUs differ in more; the interpreter has no parameters.
            for value in last:
                self._kernel[grid](*arguments, value, num_warps=num_warps)
            return
        key = (*self._kinds(arguments), num_warps)
        for value in last:
            compiled = self._compiled.get((value, key))
            if compiled is not None:
                compiled[(*grid, 1, 1)[:3]](*arguments, value)
                continue
            compiled = self._kernel[grid](*arguments, value, num_warps=num_warps)
            if compiled is not None:
                self._compiled[value, key] = compiled

    def _kinds(self, arguments: tuple[Any, ...]) -> list[Any]:
        key: list[Any] = []
        for value, by_value in zip(arguments, self._by_value, strict=False):
            if isinstance(value, torch.Tensor):
                key.append((value.dtype, value.get_device(), value.data_ptr() % 16))
            elif type(value) is int:
                key.append(value if by_value else -_INT32 <= value < _INT32)
            elif type(value) is float:
                key.append(float)
            elif hasattr(value, "block_shape"):
                key.append((value.base.dtype, tuple(value.block_shape)))
            else:
                key.append(value)
        return key
