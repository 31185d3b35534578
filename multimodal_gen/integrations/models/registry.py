"""The model families of stock pipelines: one record each, found by the name of the model class."""

from types import MappingProxyType

from multimodal_gen.integrations.models.adapter import ModelAdapter
from multimodal_gen.integrations.models.cogvideox import COGVIDEOX
from multimodal_gen.integrations.models.flux import FLUX, FLUX2
from multimodal_gen.integrations.models.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_15
from multimodal_gen.integrations.models.ltx import LTX
from multimodal_gen.integrations.models.qwen_image import QWEN_IMAGE
from multimodal_gen.integrations.models.wan import WAN, WAN_VACE

__all__ = ["ADAPTERS", "find_adapter"]

ADAPTERS: MappingProxyType[str, ModelAdapter] = MappingProxyType(
    {
        name: adapter
        for adapter in (
            WAN,
            WAN_VACE,
            HUNYUAN_VIDEO,
            HUNYUAN_VIDEO_15,
            LTX,
            FLUX,
            FLUX2,
            QWEN_IMAGE,
            COGVIDEOX,
        )
        for name in adapter.classes
    }
)
"""Adapter by the name of the model's class."""


def find_adapter(model: object) -> ModelAdapter | None:
    """Return the adapter of a model's class or of the nearest class it derives from, or None."""
    for cls in type(model).__mro__:
        if cls.__name__ in ADAPTERS:
            return ADAPTERS[cls.__name__]
    return None
