"""Attention layers, backend selection and attention kernels for diffusion transformers.

What is exported is loaded on first use, so importing the package imports neither torch nor
diffusers.
"""

from typing import TYPE_CHECKING, Any

from multimodal_gen._version import __version__

if TYPE_CHECKING:
    from multimodal_gen.integrations.comparison import compare
    from multimodal_gen.integrations.diffusers import AttentionHandle, applied, apply
    from multimodal_gen.integrations.generator import DiffGenerator, generate
    from multimodal_gen.runtime.distributed.groups import init_parallel, leave_parallel

__all__ = [
    "AttentionHandle",
    "DiffGenerator",
    "__version__",
    "applied",
    "apply",
    "compare",
    "generate",
    "init_parallel",
    "leave_parallel",
]


def __getattr__(name: str) -> Any:
    if name in ("AttentionHandle", "applied", "apply"):
        from multimodal_gen.integrations import diffusers

        return getattr(diffusers, name)
    if name == "compare":
        from multimodal_gen.integrations import comparison

        return comparison.compare
    if name in ("DiffGenerator", "generate"):
        from multimodal_gen.integrations import generator

        return getattr(generator, name)
    if name in ("init_parallel", "leave_parallel"):
        from multimodal_gen.runtime.distributed import groups

        return getattr(groups, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what is exported, whether it was loaded or not."""
    return sorted({*globals(), *__all__})
