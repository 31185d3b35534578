"""Stand-ins for backends, devices and installed packages.

Rules that hardware or an optional package would decide can then be tested anywhere.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

from multimodal_gen.kernels import engine
from multimodal_gen.kernels.block_sparse import api as block_sparse
from multimodal_gen.kernels.cluster_attention import api as cluster_attention
from multimodal_gen.kernels.kmeans import api as kmeans
from multimodal_gen.kernels.quantized_attention import api as quantized_attention
from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.kernels.tensors import place_of
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.registry import current_environment
from multimodal_gen.runtime.layers.attention.request import Environment, Feature
from multimodal_gen.runtime.platforms import (
    BUILTIN_PLATFORMS,
    AttentionBackendEnum,
    DeviceCapability,
    PlatformEnum,
    current_platform,
)

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_ASKING = (block_sparse, cluster_attention, kmeans, quantized_attention)
ALL_FEATURES = frozenset(Feature)
H100 = engine.Request(
    platform="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    head_size=128,
    q_size=128,
    kv_size=128,
)
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class PlainImpl(AttentionImpl):
    """Attention by PyTorch on one sample or segment at a time; rows outside segments are NaN."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`."""
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal:
            assert attn_mask is None, "layers fold causality into masks"
            attn_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            attn_mask = attn_mask.tril(num_keys - num_queries)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            scale=self.softmax_scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return out.transpose(1, 2)

    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_varlen`."""
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        out = query.new_full((*query.shape[:2], value.shape[2]), torch.nan)
        for sample in range(len(starts_q) - 1):
            rows = slice(starts_q[sample], starts_q[sample + 1])
            columns = slice(starts_k[sample], starts_k[sample + 1])
            assert rows.stop - rows.start <= max_seqlen_q
            assert columns.stop - columns.start <= max_seqlen_k
            if rows.stop == rows.start:
                continue
            if columns.stop == columns.start:
                out[rows] = 0.0
                continue
            segment = (query[None, rows], key[None, columns], value[None, columns])
            out[rows] = self.forward(*segment)[0]
        return out


def fake_backend(
    name: str,
    *,
    impl: type[AttentionImpl] = PlainImpl,
    features: Iterable[Feature] = ALL_FEATURES,
    variant: str | None = None,
    **declared: Any,
) -> type[AttentionBackend]:
    """Return a backend that declares what it is told and computes with `impl`.

    Args:
        name: the backend's name; a new one is registered.
        impl: what `get_impl_cls` returns.
        features: features of its only variant.
        variant: name of its variant; default `name`.
        **declared: further fields of the variant; by default it serves every platform, floating
            dtype and head size.
    """
    fields: dict[str, Any] = {
        "name": variant or name,
        "platforms": frozenset(PlatformEnum),
        "dtypes": FLOATS,
        "head_sizes": HeadSizes(),
        "features": frozenset(features),
        **declared,
    }
    only_variant = Variant(**fields)

    class Fake(AttentionBackend):
        backend = AttentionBackendEnum.register_plugin_name(name)
        summary = f"stand-in for {name}"
        variants = (only_variant,)

        @classmethod
        def get_impl_cls(cls) -> type[AttentionImpl]:
            return impl

    return Fake


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDevice:
    """What `simulated_environment` pretends to run on.

    Attributes:
        platform: kind of device.
        capability: compute capability, or None.
        packages: (module, distribution, version) of installed packages.
    """

    platform: PlatformEnum
    capability: tuple[int, int] | None = None
    packages: frozenset[tuple[str, str, str]] = frozenset()


def simulated_environment(device: FakeDevice) -> Environment:
    """Return the environment selection would see on `device`, with the real platform's rules."""
    platform = next(cls for cls in BUILTIN_PLATFORMS if cls.name is device.platform)()
    capability = DeviceCapability(*device.capability) if device.capability else None
    return Environment(
        platform=platform.name,
        device_name=f"simulated {platform.name}",
        capability=capability,
        priority=tuple(platform.attention_priority(capability)),
        always=platform.always,
        dense_fallback=platform.dense_fallback,
        packages=device.packages,
    )


@contextmanager
def machine_with(
    packages: Mapping[str, str], place: tuple[str, tuple[int, int] | None] | None = None
) -> Iterator[None]:
    """Let kernels be chosen as where other packages are installed.

    Args:
        packages: distribution -> version; others are not installed.
        place: platform and compute capability that every tensor seems to lie on; None for its own.
    """
    with ExitStack() as stack:
        stack.callback(engine.forget_choices)
        engine.forget_choices()
        stack.enter_context(
            patch.object(engine, "installed", lambda probe: packages.get(probe.distribution))
        )
        stack.enter_context(patch.object(engine, "_interpreted", lambda: False))
        if place is not None:
            for module in _ASKING:
                stack.enter_context(patch.object(module, "place_of", lambda _: place))
        yield


class _Idle:
    """A stream or an event of a GPU that does nothing."""

    def __init__(self, *given: object, **more: object) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **more: self


@contextmanager
def simulated_h100() -> Iterator[None]:
    """Let torch seem to see one H100; nothing can run on it.

    For a process of its own: what the package caches meanwhile is of that GPU.
    """
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        total_memory=80 << 30,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "current_stream": _Idle,
        "Stream": _Idle,
        "Event": _Idle,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch.version, "cuda", "12.8"))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda *given: None))
        for known in (current_platform, current_environment, place_of):
            known.cache_clear()
            stack.callback(known.cache_clear)
        yield
