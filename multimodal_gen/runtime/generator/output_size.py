"""How large the output of a pipeline will be."""

from typing import Any

from multimodal_gen.runtime.generator.loading import PipelineIndex
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["output_size"]


def output_size(pipe: Any, index: PipelineIndex, args: ServerArgs) -> tuple[int | str, int | str]:
    """Return width and height of the output in pixels, or "default" where that is unknown."""
    sizes: list[int | str] = []
    for name in ("width", "height"):
        default = getattr(index.parameters.get(name), "default", None)
        if not isinstance(default, int):
            edge: Any = getattr(pipe, "default_sample_size", None)
            scale: Any = getattr(pipe, "vae_scale_factor", None)
            known = isinstance(edge, int) and isinstance(scale, int)
            default = edge * scale if known else "default"
        sizes.append(getattr(args, name) or default)
    return sizes[0], sizes[1]
