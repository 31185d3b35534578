"""What a backend is: a declaration selection reads as data, and an implementation layers call.

Shapes: B batch, S tokens, H heads, D head size, T packed tokens; public tensors are [B, S, H, D].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from typing_extensions import override

from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.kernels.requirements import PackageProbe, platform_reason
from multimodal_gen.runtime.layers.attention.backends.common import (
    align_rows,
    attend_to_nothing,
    refuse_mask,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, LayerSite
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS, WarnOnce
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum


class Facts(NamedTuple):
    """What an implementation knows of its calls so far.

    Attributes:
        densities: for sparse methods, the share of pairs attended to, by denoising step.
        skipped: the share of a kernel's steps that were left out; None where none can be.
    """

    densities: Mapping[int, float] = MappingProxyType({})
    skipped: float | None = None


class Limits(NamedTuple):
    """What an implementation cannot do, so configured, and why; None where it can.

    What calls alone can tell, such as a mask that no kernel takes, its variants declare.

    Attributes:
        ulysses: serve a share of the heads.
        ring: be part of a ring.
        ring_gradients: record gradients in a ring.
        cache: choose among the blocks of a cache of chunks, without which such calls are dense.
    """

    ulysses: str | None = None
    ring: str | None = None
    ring_gradients: str | None = None
    cache: str | None = None


class AttentionImpl(ABC):
    """The attention of one layer on one backend.

    It is given all it needs when it is constructed; a call brings all that varies. `forward` is
    what every implementation has; the other methods are optional.

    Args:
        num_heads: query heads.
        head_size: channels per head.
        softmax_scale: factor on q k^T before the softmax.
        causal: mask out keys after the query, aligned to the last query and key (bottom right).
        num_kv_heads: key and value heads; `num_heads` when None.
        config: the backend's configuration; its defaults when None.
        variant: name of the chosen `Variant`.
        site: where the layer sits, or None outside any layer.
        warnings: what its user was warned of; those of the process by default.

    Attributes:
        takes: what else `forward` takes by name, of `AttentionCall`: `first_head` and
            `continued` where settings differ by head, `projection` where a trained projection
            weighs a branch, `gate` where a gate does.
        masks_lse: whether `forward_lse` takes `mask`, without waiting for the device.
        limits: what it cannot do, and why.
        is_sparse: whether it is a `SparseMethodImpl`, of which layers ask more.
        kernel: what was selected of this package's kernels, and ran in calls and backward passes;
            None where another library computes the attention.
    """

    kernel: SelectedKernel | None = None
    takes: tuple[str, ...] = ()
    masks_lse: ClassVar[bool] = False
    limits: Limits = Limits()
    is_sparse: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        *,
        config: BackendConfig | None = None,
        variant: str = "",
        site: LayerSite | None = None,
        warnings: WarnOnce = PROCESS,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.config = config
        self.variant = variant
        self.site = site
        self.warnings = warnings

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of `query` over `key` and `value`.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, Dv].
            context: what is known of the running denoiser call, or None outside one.
            attn_mask: bool (True attends) or additive, broadcastable to [B, H, Sq, Sk]. Passed
                only when the variant declares `dense_mask`, or `key_mask` and the mask is
                [B, 1, 1, Sk]. An additive one has the dtype of `query`.

        Returns:
            [B, Sq, H, Dv], dtype of `query`. Rows of queries that see no key are zero.
        """

    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [B, Sq, H, Dv] and the natural-log-sum-exp [B, H, Sq] in fp32.

        Called only when the variant declares `lse`.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, Dv].
            mask: bool [B, Sk], keys that count; what others hold, even NaN, has no influence. Given
                only where `masks_lse`, and then nothing is causal.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no lse")

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
        """Return attention within each packed segment.

        Called only when the variant declares `varlen`. Rows past the last segment may hold
        anything on input and on output.

        Args:
            query: [Tq, H, D].
            key: [Tk, Hkv, D].
            value: [Tk, Hkv, Dv].
            cu_seqlens_q: int32 [B + 1], where each segment's queries start; the last is the end.
            cu_seqlens_k: int32 [B + 1], the same for keys.
            max_seqlen_q: upper bound of the segments' query lengths.
            max_seqlen_k: upper bound of the segments' key lengths.

        Returns:
            [Tq, H, Dv]. Rows of queries whose segment has no key are zero.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no varlen")

    def facts(self) -> Facts:
        """Return what its calls were like so far, for the report; may wait for the device."""
        return Facts()


class DenseImpl(AttentionImpl):
    """Dense attention through a library, which may leave some of bottom-right causality to us.

    Subclasses write `_attend`. It gets no causal call with more queries than keys, whose first
    queries see no key; where `only_square`, it gets only causal calls of as many.

    Attributes:
        label: the backend's name in errors.
        function: "module:name" of the library's function, which is imported with the layer and
            then called as `self.run`; "" where a subclass finds its own.
        only_square: whether the library is right about causality for equal lengths only.
    """

    label: ClassVar[str]
    function: ClassVar[str] = ""
    only_square: bool = False
    run: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.function:
            self.run = resolve_name(self.function)

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and log-sum-exp as `forward_lse` does.

        The latter may be None where `lse` is false or the variant declares none.
        """

    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the output under a mask as `forward` takes it."""
        refuse_mask(mask, self.label)
        raise AssertionError("refused above")

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_mask is not None:
            return self._attend_masked(query, key, value, attn_mask)
        attend = self._attend_aligned if self.causal else self._attend
        return attend(query, key, value, lse=False)[0]

    @override
    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_mask(mask, self.label)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)  # torch's CPU operator divides by zero
        attend = self._attend_aligned if self.causal else self._attend
        out, lse = attend(query, key, value, lse=True)
        if lse is None:
            return super().forward_lse(query, key, value)
        return out, lse

    def _attend_aligned(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and log-sum-exp of a causal call."""
        num_queries, num_keys = query.shape[1], key.shape[1]
        if num_queries == num_keys or (num_queries < num_keys and not self.only_square):
            return self._attend(query, key, value, lse=lse)
        out, stats = self._attend(align_rows(query, num_keys), key, value, lse=lse)
        out = align_rows(out, num_queries)
        return out, None if stats is None else align_rows(stats, num_queries, 2, -math.inf)


DenseLimits: TypeAlias = Mapping[str, tuple[tuple[int, float], ...]]
"""Kernel -> (tokens of a block from which on it holds, share of pairs), ascending."""


class AttentionBackend(ABC):
    """One backend: its declaration, its configuration and the class layers call.

    Attributes:
        backend: the name.
        summary: one line for `sglang attention list`.
        variants: kernel libraries behind it, best first.
        config_cls: its configuration dataclass.
        packages: packages that its configuration may demand, apart from those of the variants.
        never_unasked: why it is only for those who ask for it, however fast; "" for others.
        operand_bits: to how many bits it rounds operands, where those are less than 16.
        trained_by: the backend whose training serves it, where it has no backward pass.
        head_groups: in how many groups of heads a forward under Ulysses was faster than in one, by
            the rows of scripts/bench/results/parallel.csv; 1 where none was, or none was measured.
        dense_above: the share of pairs at which a layer of a sparse method takes as long as dense
            attention, by kernel and size of block; nothing for kernels that were not measured. One
            H200, torch 2.11, triton 3.6, bf16, head size 128. With gluon it is the density of a row
            of scripts/bench/results times the time of `auto` at that shape in dense.csv at
            56740c3, over the time of the layer; of several rows of at least 75,600 tokens, the
            least. With triton there are no rows of layers: it is what the engine's rows in
            engine.csv leave of it.
    """

    backend: ClassVar[AttentionBackendEnum]
    summary: ClassVar[str]
    variants: ClassVar[tuple[Variant, ...]]
    config_cls: ClassVar[type[BackendConfig]] = BackendConfig
    packages: ClassVar[tuple[PackageProbe, ...]] = ()
    never_unasked: ClassVar[str] = ""
    operand_bits: ClassVar[int] = 16
    trained_by: ClassVar[str] = ""
    head_groups: ClassVar[int] = 1
    dense_above: ClassVar[DenseLimits] = MappingProxyType({})

    @classmethod
    def get_enum(cls) -> AttentionBackendEnum:
        """Return the backend's name."""
        return cls.backend

    @classmethod
    @abstractmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation; the only place that may import optional packages."""

    @classmethod
    def declared_packages(cls) -> frozenset[PackageProbe]:
        """Return the packages that its variants and its configuration may demand."""
        return frozenset(cls.packages).union(*(variant.packages for variant in cls.variants))

    @classmethod
    def get_supported_head_sizes(cls) -> tuple[int, ...]:
        """Return the head sizes in 8..512 that at least one variant takes."""
        return tuple(s for s in range(8, 513, 8) if any(s in v.head_sizes for v in cls.variants))

    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        """Return the variants that the parameters leave: the one `kernel` names, or all."""
        kernel = getattr(config, "kernel", "auto")
        return tuple(v for v in cls.variants if kernel in ("auto", v.name))

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return queries and keys of a block of the method's plans; 0 where it has none.

        What a call makes of them, where its latents are small, is not known here.
        """
        return 0, 0

    @classmethod
    def config_reasons(
        cls, request: AttentionRequest, config: BackendConfig | None
    ) -> tuple[str, ...]:
        """Return why no variant serves the parameters where `request` runs; usually nothing."""
        return ()

    @classmethod
    def choose_variant(
        cls, request: AttentionRequest, config: BackendConfig | None = None
    ) -> Variant | None:
        """Return the first variant `config` leaves that serves `request`."""
        if cls.config_reasons(request, config):
            return None
        blocks = cls.block_sizes(config)
        for variant in cls.variants_for(config):
            if not variant.unsupported_reasons(request, blocks):
                return variant
        return None

    @classmethod
    def unsupported_reasons(
        cls, request: AttentionRequest, config: BackendConfig | None = None
    ) -> tuple[str, ...]:
        """Return every reason the backend, so configured, cannot serve `request`.

        Variants for other platforms are left out where some serve the request's platform, and
        variants for other GPUs where some are for the request's GPU. Where none serves the
        platform, that is the only reason given: no remedy changes it.
        """
        reasons = cls.config_reasons(request, config)
        variants, blocks = cls.variants_for(config), cls.block_sizes(config)
        if not all(variant.unsupported_reasons(request, blocks) for variant in variants):
            return reasons
        platform = request.environment.platform
        here = [variant for variant in variants if platform in variant.platforms]
        if not variants:
            return (f"has no such kernel on {platform}",)
        if not here:
            served = {name for variant in variants for name in variant.platforms}
            return tuple(filter(None, [platform_reason(served, platform)]))
        here = [v for v in here if v.capability_reason(request) is None] or here
        if len(here) == 1:
            return (*here[0].unsupported_reasons(request, blocks), *reasons)
        named = (
            f"{variant.name}: {reason}"
            for variant in here
            for reason in variant.unsupported_reasons(request, blocks)
        )
        return (*named, *reasons)

    @classmethod
    def reasons_against_auto(cls, request: AttentionRequest) -> tuple[str, ...]:
        """Return why a supported backend should still not be chosen unasked; usually nothing."""
        return ()


class DenseBackend(AttentionBackend):
    """A backend whose implementation stands in the file of its declaration.

    Attributes:
        impl: the implementation.
    """

    impl: ClassVar[type[AttentionImpl]]

    @override
    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl
