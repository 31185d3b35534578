"""What holds for every declaration: each "no" is refused, each "yes" is not."""

import inspect
from dataclasses import replace

import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.flashinfer import FlashInferBackend
from multimodal_gen.runtime.layers.attention.backends.registry import all_backends, backends_of
from multimodal_gen.runtime.layers.attention.backends.sdpa import CudnnSDPABackend, SDPABackend
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Environment,
    Feature,
)
from multimodal_gen.runtime.platforms import DeviceCapability, PlatformEnum

DECLARED = [
    (cls, variant)
    for name in all_backends()
    for cls in backends_of(name)
    for variant in cls.variants
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def fitting_request(variant: Variant) -> AttentionRequest:
    """Return a request that names nothing the variant does not declare."""
    capability = (variant.capability.exact or (variant.capability.minimum,))[0]
    environment = Environment(
        platform=min(variant.platforms, key=str),
        capability=DeviceCapability(*capability),
        packages=frozenset(
            (probe.module, probe.distribution, probe.minimum or "1.0") for probe in variant.packages
        ),
    )
    return AttentionRequest(
        environment=environment,
        head_size=next(size for size in range(1, 1024) if size in variant.head_sizes),
        num_heads=8,
        num_kv_heads=8,
        dtype=min(variant.dtypes, key=str),
        role=min(variant.roles, key=str),
        needs=variant.features,
    )


variants = pytest.mark.parametrize(
    "variant", [v for _, v in DECLARED], ids=[f"{c.backend}-{v.name}" for c, v in DECLARED]
)


@variants
def test_everything_declared_at_once_is_served(variant):
    assert variant.unsupported_reasons(fitting_request(variant)) == ()


@variants
def test_everything_undeclared_is_refused_with_one_reason(variant):
    request = fitting_request(variant)
    environment = request.environment
    changes = [
        *(replace(request, dtype=dtype) for dtype in DTYPES if dtype not in variant.dtypes),
        *(
            replace(request, head_size=size)
            for size in range(1, 1025)
            if size not in variant.head_sizes
        ),
        *(replace(request, role=role) for role in AttentionRole if role not in variant.roles),
        *(request.with_needs(f) for f in Feature if f not in variant.features),
        *(
            replace(request, environment=replace(environment, platform=platform))
            for platform in PlatformEnum
            if platform not in variant.platforms
        ),
    ]
    if Feature.GQA not in variant.features:
        changes.append(replace(request, num_kv_heads=2))
    if variant.packages:
        changes.append(replace(request, environment=replace(environment, packages=frozenset())))
    for change in changes:
        assert variant.unsupported_reasons(change)
    for change in changes[:-1]:
        assert len(variant.unsupported_reasons(change)) == 1


@pytest.mark.parametrize(
    ("cls", "variant"), [pytest.param(c, v, id=f"{c.backend}-{v.name}") for c, v in DECLARED]
)
def test_ring_is_declared_only_with_a_log_sum_exp_or_a_ring_of_its_own(cls, variant):
    if Feature.RING in variant.features and Feature.LSE not in variant.features:
        assert cls.get_impl_cls().is_sparse


def test_supported_head_sizes_are_those_of_any_variant():
    assert FlashInferBackend.get_supported_head_sizes() == (64, 128, 256)
    assert CudnnSDPABackend.get_supported_head_sizes() == tuple(range(8, 257, 8))
    assert SDPABackend.get_supported_head_sizes() == tuple(range(8, 513, 8))


@pytest.mark.parametrize("cls", sorted({c for c, _ in DECLARED}, key=str), ids=lambda c: c.__name__)
def test_names_of_variants_are_unique_within_a_backend(cls):
    names = [variant.name for variant in cls.variants]
    assert len(names) == len(set(names))


def test_the_contract_of_a_backend_stays_small():
    own = [name for name in vars(AttentionImpl) if not name.startswith("_")]
    methods = [name for name in own if inspect.isfunction(getattr(AttentionImpl, name))]
    assert len(methods) <= 7, methods
