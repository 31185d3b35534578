"""The model families of stock pipelines: one record each, found by the name of the model class."""

from types import MappingProxyType

from multimodal_gen.integrations.models.adapter import ModelAdapter
from multimodal_gen.integrations.models.allegro import ALLEGRO
from multimodal_gen.integrations.models.anyflow import ANYFLOW
from multimodal_gen.integrations.models.cogvideox import COGVIDEOX, CONSISID
from multimodal_gen.integrations.models.cosmos import COSMOS
from multimodal_gen.integrations.models.cosmos3 import COSMOS3
from multimodal_gen.integrations.models.easyanimate import EASYANIMATE
from multimodal_gen.integrations.models.flux import FLUX, FLUX2
from multimodal_gen.integrations.models.flux3 import FLUX3
from multimodal_gen.integrations.models.helios import HELIOS
from multimodal_gen.integrations.models.hunyuan_image import HUNYUAN_IMAGE
from multimodal_gen.integrations.models.hunyuan_video import (
    FRAMEPACK,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
)
from multimodal_gen.integrations.models.kandinsky import KANDINSKY5, KANDINSKY6
from multimodal_gen.integrations.models.krea2 import KREA2
from multimodal_gen.integrations.models.ltx import LTX
from multimodal_gen.integrations.models.ltx2 import LTX2
from multimodal_gen.integrations.models.minimax_h3 import MINIMAX_H3
from multimodal_gen.integrations.models.mochi import MOCHI
from multimodal_gen.integrations.models.motif_video import MOTIF_VIDEO
from multimodal_gen.integrations.models.qwen_image import QWEN_IMAGE, QWEN_IMAGE_21
from multimodal_gen.integrations.models.sana_video import SANA_VIDEO
from multimodal_gen.integrations.models.sd3 import SD3
from multimodal_gen.integrations.models.skyreels_v2 import SKYREELS_V2
from multimodal_gen.integrations.models.wan import CHRONOEDIT, WAN, WAN_ANIMATE, WAN_VACE
from multimodal_gen.integrations.models.z_image import Z_IMAGE

ADAPTERS: MappingProxyType[str, ModelAdapter] = MappingProxyType(
    {
        name: adapter
        for adapter in (
            WAN,
            WAN_VACE,
            CHRONOEDIT,
            SKYREELS_V2,
            HUNYUAN_VIDEO,
            HUNYUAN_VIDEO_15,
            LTX,
            FLUX,
            FLUX2,
            QWEN_IMAGE,
            COGVIDEOX,
            COSMOS,
            KANDINSKY5,
            LTX2,
            MOTIF_VIDEO,
            SANA_VIDEO,
            HUNYUAN_IMAGE,
            SD3,
            Z_IMAGE,
            MINIMAX_H3,
            KREA2,
            QWEN_IMAGE_21,
            FLUX3,
            KANDINSKY6,
            WAN_ANIMATE,
            ANYFLOW,
            HELIOS,
            COSMOS3,
            FRAMEPACK,
            ALLEGRO,
            EASYANIMATE,
            CONSISID,
            MOCHI,
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
