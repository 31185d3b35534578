"""What layers ask about the tensors of a call: autocast and gradients."""

import torch

__all__ = ["autocast", "autocasts", "wants_gradient"]


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device."""
    # Asking about "meta" is an error, and torch 2.11 cannot trace what tells such devices apart.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for torch's own attention: selection then sees what kernels get."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    # Autocast leaves doubles alone.
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
        for x in tensors
    )


def wants_gradient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
) -> bool:
    """Whether autograd records what is computed from the tensors."""
    # Spelled out: a generator would cost more than the rest of the call.
    return torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )
