"""What a run really made: whether it is a picture at all, and of which size."""

from collections.abc import Sequence
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.denoise import Denoised
from multimodal_gen.runtime.layers.attention.report import Json
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["check_finite", "differences", "produced"]

_REMEDY = "try --dtype bfloat16 or float32, another --attention-backend, or a smaller guidance"


def check_finite(run: Denoised) -> None:
    """Refuse a result that would be written as black.

    Raises:
        UsageError: latents are nan or infinite, or a whole output is.
    """
    import numpy as np

    bad = run.latents.numel() - int(torch.isfinite(run.latents).sum())
    if bad:
        raise UsageError(
            f"the denoised latents must be finite, got {bad} of {run.latents.numel()} values that "
            f"are nan or infinite; {_REMEDY}"
        )
    for pixels in run.pixels:
        if not np.isfinite(pixels).any():
            raise UsageError(
                "the decoded pixels must be finite, got nothing but nan or infinite values from "
                "finite latents; the autoencoder overflows: try --dtype bfloat16 or float32"
            )


def produced(pixels: Sequence[Any]) -> dict[str, Json]:
    """Return sizes and number of the outputs, and how many values had to be replaced by black.

    Args:
        pixels: one [T, H, W, C] array per video or [H, W, C] per image.
    """
    import numpy as np

    shape = pixels[0].shape
    return {
        "num_outputs": len(pixels),
        "num_frames": shape[0] if len(shape) == 4 else None,
        "height": shape[-3],
        "width": shape[-2],
        "non_finite_values": sum(int(array.size - np.isfinite(array).sum()) for array in pixels),
    }


def differences(made: dict[str, Json], args: ServerArgs) -> tuple[str, ...]:
    """Return a note for each size that was asked for and is not what was made."""
    notes = []
    for name in ("num_outputs", "num_frames", "height", "width"):
        asked = getattr(args, name)
        if asked is not None and made[name] != asked:
            flag = "--" + name.replace("_", "-")
            notes.append(f"{flag} {asked} was asked for, the pipeline made {made[name]}")
    return tuple(notes)
