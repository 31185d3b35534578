"""What the class of a diffusers pipeline tells of its guidance, before anything is computed."""

import inspect
from collections.abc import Iterable

from multimodal_gen.errors import UsageError


def has_branches(pipeline_class: type, denoiser_classes: Iterable[type]) -> bool:
    """Return whether a pipeline can guide by two branches at all.

    Those that cannot pass the guidance scale to a denoiser that was distilled.

    Args:
        pipeline_class: a pipeline of diffusers.
        denoiser_classes: its denoisers.
    """
    takes = inspect.signature(pipeline_class.__call__).parameters
    if any(name.startswith("negative_") for name in takes):
        return True
    if hasattr(pipeline_class, "do_classifier_free_guidance"):
        return True
    return not any(
        "guidance" in inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
        for cls in denoiser_classes
    )


def unguided_error(name: str, got: str, advice: str) -> UsageError:
    """Return the error for a generation that has one branch only.

    Args:
        name: its pipeline.
        got: what was given instead of guidance.
        advice: what to do, other than to drop the flag.
    """
    return UsageError(
        f"{name} must use classifier-free guidance under --cfg-parallel, which gives each of its "
        f"two branches to GPUs of their own, got {got}; {advice}, or drop --cfg-parallel"
    )


def one_branch_error(name: str) -> UsageError:
    """Return the error for a pipeline whose generations all have one branch."""
    return UsageError(
        f"{name} must not run under --cfg-parallel, which gives each of two guidance branches to "
        f"GPUs of their own: its denoiser was distilled to have one branch; drop --cfg-parallel"
    )
