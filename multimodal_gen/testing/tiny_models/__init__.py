"""Tiny pipelines of every supported model family, made on the spot.

They have the real diffusers and transformers classes with random weights and locally trained
tokenizers, so what runs on them runs the same code as on the published models, in seconds and
without a download. torch and diffusers are imported when a pipeline is made, not before.
"""

from multimodal_gen.testing.tiny_models.family import TinyFamily
from multimodal_gen.testing.tiny_models.make import (
    FAMILIES,
    STREAMING_FAMILIES,
    check_request,
    make_tiny_model,
)

__all__ = ["FAMILIES", "STREAMING_FAMILIES", "TinyFamily", "check_request", "make_tiny_model"]
