"""The record that describes one tiny pipeline family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from multimodal_gen.testing.tiny_models.corpus import DEFAULT_PROMPT

__all__ = ["TinyFamily"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """What can be made under one family name, and how to run it in a second or two on a CPU.

    Attributes:
        name: Family name, as given to `make_tiny_model`.
        pipeline_class: Name of the diffusers pipeline class.
        output: What the pipeline generates.
        build: Constructs the pipeline from a seed. Imports torch and diffusers when called.
        height: Pixels.
        width: Pixels.
        num_frames: Pixel frames of a video; None for an image.
        num_inference_steps: Denoising steps.
        guidance_name: The pipeline's argument for classifier-free or distilled guidance; None when
            it has none (HunyuanVideo-1.5 keeps the scale in its `guider` component).
        guidance_scale: Value for that argument.
        latent_grid: Tokens the transformer sees at this size, as (frames, height, width) after
            patching. The three numbers differ wherever there is more than one frame.
        extra_kwargs: Further pipeline arguments, such as a negative prompt that turns guidance on.
    """

    name: str
    pipeline_class: str
    output: Literal["video", "image"]
    build: Callable[[int], Any]
    height: int
    width: int
    num_frames: int | None = None
    num_inference_steps: int = 3
    guidance_name: str | None = "guidance_scale"
    guidance_scale: float | None = None
    latent_grid: tuple[int, int, int]
    extra_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """A new dict of keyword arguments for one call of the pipeline, the prompt included."""
        kwargs: dict[str, Any] = {
            "prompt": DEFAULT_PROMPT,
            "height": self.height,
            "width": self.width,
            "num_inference_steps": self.num_inference_steps,
        }
        if self.num_frames is not None:
            kwargs["num_frames"] = self.num_frames
        if self.guidance_name is not None and self.guidance_scale is not None:
            kwargs[self.guidance_name] = self.guidance_scale
        return {**kwargs, **self.extra_kwargs}
