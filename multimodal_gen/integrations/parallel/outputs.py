"""The noise prediction in what a denoiser returns: a tuple of one, or diffusers' output class."""

from typing import Any

import torch

__all__ = ["sample_of", "with_sample"]


def sample_of(output: Any) -> torch.Tensor | None:
    """Return the prediction, or None where a denoiser returns something else or more."""
    if isinstance(output, tuple) and len(output) == 1:
        output = output[0]
    elif hasattr(output, "sample") and len(output) == 1:
        output = output.sample
    return output if isinstance(output, torch.Tensor) else None


def with_sample(like: Any, sample: torch.Tensor) -> Any:
    """Return `sample` in an output like another one."""
    if isinstance(like, torch.Tensor):
        return sample
    return (sample,) if type(like) is tuple else type(like)(sample=sample)
