"""What is asked of tensors before a kernel is chosen for them."""

from functools import cache, lru_cache

import torch

from multimodal_gen.errors import UsageError, first_line, short


@cache
def place_of(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """Return the platform of a tensor's device, and the compute capability of an NVIDIA GPU."""
    if device.type != "cuda":
        return device.type, None
    if torch.version.hip is not None:
        return "rocm", None
    return "cuda", torch.cuda.get_device_capability(device)


def loadable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can read tensors, each [B, S, H, D]: in rows of 16 bytes."""
    for tensor in tensors:
        if tensor.data_ptr() % 16:
            return False
        # Most are contiguous, and this is asked of every tensor of every call.
        whole = tensor.is_contiguous() and tensor.shape[3] * tensor.element_size() % 16 == 0
        if not whole and not _loadable_rows(tensor.shape, tensor.stride(), tensor.dtype):
            return False
    return True


@lru_cache(maxsize=1024)
def _loadable_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    outer = [s for s, n in zip(strides[:3], shape, strict=False) if n > 1]
    return strides[3] == 1 and all(s > 0 and s * dtype.itemsize % 16 == 0 for s in outer)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than one: subclasses learn of operators alone."""
    kind = type(tensor)
    return kind is torch.Tensor or kind is torch.nn.Parameter


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with entries of its last dimension side by side, copied if need be."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def usable_device(device: object) -> torch.device:
    """Return what a caller names as its `device`.

    Raises:
        UsageError: it is none, or this machine has no such device.
    """
    try:
        found = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"`device` must be a torch device of this machine, got {short(device)} "
            f"({first_line(error).partition('. ')[0]})"
        ) from error
    return found


def check_mask(mask: torch.Tensor | None, tokens: torch.Tensor) -> None:
    """Raise unless a mask, where there is one, is one of tokens [B, S, ...]."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
        raise UsageError(
            f"`mask` must be bool {list(tokens.shape[:2])}, got {mask.dtype} {list(mask.shape)}"
        )
