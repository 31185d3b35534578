"""Tensors as the copy engine of SM90 takes them: by address, sizes, strides and boxes.

A descriptor is made once per place and form, and holds no memory, so that launches can keep what
the driver makes of it; see `launcher.Direct`.
"""

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multimodal_gen.kernels.launch.launcher import Address

_AS_IT_IS = (0, 1, 2)
TOKENS_BY_HEAD = (0, 2, 1)
"""Order in which [B, S, H, D] is described as [B, H, S, D]."""


def describe(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a tensor of four dimensions in boxes of [1, 1, rows, columns].

    Its first element must lie at a multiple of 16 bytes, and so must every row of its last
    dimension, whose stride is 1.
    """
    form = (tensor.shape, tensor.stride(), tensor.dtype, rows, columns)
    return described_at(tensor.data_ptr(), *form)


def describe_tokens(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe [B, S, H, D] as [B, H, S, D], in boxes of [1, 1, rows, columns]; see `describe`."""
    form = (tensor.shape, tensor.stride(), tensor.dtype, rows, columns, TOKENS_BY_HEAD)
    return described_at(tensor.data_ptr(), *form)


@lru_cache(maxsize=4096)
def described_at(
    address: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    rows: int,
    columns: int,
    order: tuple[int, int, int] = _AS_IT_IS,
) -> TensorDescriptor:
    """Return the descriptor of a tensor at an address, the same one while it is kept.

    Args:
        address: of the first element, a multiple of 16 bytes; nothing holds the memory.
        shape: sizes of the tensor.
        strides: of the tensor, in elements.
        dtype: of the elements.
        rows: of a box.
        columns: of a box, along the last dimension.
        order: of the other dimensions in the descriptor.
    """
    form = _described(shape, strides, dtype, rows, columns, order)
    # The constructor looks at sizes and strides again, which takes longer than a small kernel runs.
    other: TensorDescriptor = object.__new__(TensorDescriptor)
    other.__dict__.update(form.__dict__)
    other.base = Address(address, dtype)
    return other


@lru_cache(maxsize=1024)
def _described(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    rows: int,
    columns: int,
    order: tuple[int, int, int],
) -> TensorDescriptor:
    bits = 8 * dtype.itemsize
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(columns * bits // 8, 128), element_bitwidth=bits, rank=4
    )
    # Strides of dimensions of size 1 mean nothing, but must be multiples of 16 bytes as well.
    steps = [strides[i] if shape[i] > 1 else 64 for i in order]
    sizes = [shape[i] for i in (*order, 3)]
    return TensorDescriptor(Address(0, dtype), sizes, [*steps, 1], [1, 1, rows, columns], layout)
