"""`sage_attn` on the CPU, by the definition of its 8-bit kernels."""

import pytest

from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.runtime.layers.attention.backends.declaration import BASIC, MERGEABLE, Variant
from multimodal_gen.runtime.layers.attention.backends.sage_attn import SageAttentionBackend
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import PlatformEnum


def allow_on_cpus(patch: pytest.MonkeyPatch) -> None:
    """Let `sage_attn` run on the CPU until `patch` is undone."""
    here = Variant(
        name="reference",
        platforms=frozenset({PlatformEnum.CPU}),
        head_sizes=HeadSizes(maximum=128),
        features=BASIC | MERGEABLE | {Feature.KEY_MASK},
    )
    patch.setattr(SageAttentionBackend, "variants", (here,))
