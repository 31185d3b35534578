"""Declarations shared by the backends that stand on the block-sparse engine.

The engine's own kernels need nothing beyond torch and the Triton that comes with it; a method's
upstream package is one more variant where it is installed.
"""

from collections.abc import Iterable

import torch

from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.flash_attn import FLASH_ATTN_4
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRole,
    Feature,
    PackageProbe,
)
from multimodal_gen.runtime.platforms import PlatformEnum

SELF_ONLY = frozenset({AttentionRole.SELF})
CUDA_ONLY = frozenset({PlatformEnum.CUDA})
BF16_ONLY = frozenset({torch.bfloat16})

TRITON = PackageProbe(module="triton", distribution="triton", install="pip install triton")
# Gluon is experimental: its interface changes with every minor release.
TRITON_WITH_GLUON = PackageProbe(
    module="triton",
    distribution="triton",
    install="pip install 'triton==3.6.*'",
    minimum="3.6",
    below="3.7",
)
FASTVIDEO_KERNEL = PackageProbe(
    module="fastvideo_kernel",
    distribution="fastvideo-kernel",
    install="pip install fastvideo-kernel einops",
)
SPAS_SAGE_ATTN = PackageProbe(
    module="spas_sage_attn",
    distribution="spas_sage_attn",
    install="pip install git+https://github.com/thu-ml/SpargeAttn.git --no-build-isolation",
)

_HEAD_SIZES = HeadSizes(minimum=32, maximum=256, multiple_of=16)
_HOPPER = Capability(exact=((9, 0),))


def engine_variants(features: Iterable[Feature]) -> tuple[Variant, ...]:
    """Return the block-sparse engine's kernels, fastest first, each with `features`.

    Args:
        features: what the method can honour on every kernel.
    """
    shared = frozenset(features)
    return (
        Variant(
            name="gluon",
            platforms=CUDA_ONLY,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=32, maximum=128, multiple_of=16),
            features=shared,
            packages=(TRITON_WITH_GLUON,),
            capability=_HOPPER,
            roles=SELF_ONLY,
        ),
        Variant(
            name="fa4",
            platforms=CUDA_ONLY,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 96, 128)),
            features=shared,
            packages=(FLASH_ATTN_4,),
            capability=Capability(exact=((9, 0), (10, 0))),
            roles=SELF_ONLY,
        ),
        Variant(
            name="triton",
            platforms=frozenset({PlatformEnum.CUDA, PlatformEnum.ROCM}),
            dtypes=HALF_DTYPES,
            head_sizes=_HEAD_SIZES,
            features=shared,
            packages=(TRITON,),
            capability=Capability(minimum=(8, 0)),
            roles=SELF_ONLY,
        ),
        Variant(
            name="reference",
            platforms=frozenset(PlatformEnum),
            dtypes=HALF_DTYPES | {torch.float32},
            head_sizes=_HEAD_SIZES,
            features=shared | {Feature.BACKWARD},
            roles=SELF_ONLY,
        ),
    )


def upstream_variant(
    name: str,
    *packages: PackageProbe,
    head_sizes: tuple[int, ...] = (64, 128),
    capability: Capability = _HOPPER,
) -> Variant:
    """Return the declaration of a method's own package: bfloat16 self attention on CUDA.

    Args:
        name: short name for reports and for the `kernel` parameter.
        *packages: packages that must all be installed.
        head_sizes: head sizes its kernel takes.
        capability: compute capabilities its kernel runs on.
    """
    return Variant(
        name=name,
        platforms=CUDA_ONLY,
        dtypes=BF16_ONLY,
        head_sizes=HeadSizes(listed=head_sizes),
        features=frozenset(),
        packages=packages,
        capability=capability,
        roles=SELF_ONLY,
    )
