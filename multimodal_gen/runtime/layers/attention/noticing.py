"""Implementations that have something to tell the user of a pipeline."""

from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.notices import PROCESS, Notices

__all__ = ["NoticingImpl"]


class NoticingImpl(AttentionImpl):
    """An implementation with notices.

    Attributes:
        notices: of its pipeline, which the layer sets; of the process where there is no layer.
    """

    notices: Notices = PROCESS
