"""One attention call, what its layer is, and the checks of the arguments that layers take.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import NamedTuple

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import ProjectionSlot
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta
from multimodal_gen.runtime.layers.attention.scope import LayerSite
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS, WarnOnce

__all__ = [
    "AttentionCall",
    "LayerGeometry",
    "all_or_none",
    "check_mask_meta",
    "check_no_replicated",
    "check_numbers",
    "check_replicated",
    "check_seq_lens",
    "check_sizes",
    "check_split",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """What an implementation is constructed with.

    Attributes:
        num_heads: query heads.
        head_size: channels per head.
        num_kv_heads: key and value heads.
        softmax_scale: factor on q k^T.
        causal: bottom-right aligned causality.
        site: where the layer sits.
        projection: the trained projection of methods that have one; may be filled at any time.
        warnings: what its user was warned of.

    Raises:
        ConfigError: `causal` is no bool; text such as "no" would count as true.
    """

    num_heads: int
    head_size: int
    num_kv_heads: int
    softmax_scale: float
    causal: bool
    site: LayerSite
    projection: ProjectionSlot = field(default_factory=ProjectionSlot, compare=False)
    warnings: WarnOnce = field(default=PROCESS, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ConfigError(f"causal must be True or False, got {self.causal!r}")


class AttentionCall(NamedTuple):
    """One call of a layer, from its `forward` to an implementation.

    What a caller gives are the first five, `mask_meta`, `replicated`, `seq_lens` and `exchange`;
    the others are set on the way. While `torch.compile` traces, a packing is not carried along: it
    is made again.

    Attributes:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        mask: as `LocalAttention.forward` takes it; where tokens are split over ranks, the part of
            this rank.
        gate: [B, Sq, H, D] weight of a coarse branch, or None.
        mask_meta: packing of a 2-D `mask`, where the caller has it already.
        whole_mask: the mask of the tokens of all ranks, where the caller has it already.
        replicated: tokens that all ranks hold: in front, at the end, and keys in front.
        seq_lens: tokens of each rank; None to let ranks tell each other.
        exchange: whether the layer may exchange tokens with other ranks.
        first_head: index of the first head of `query` among the layer's heads.
        zero_rows: rows of zeros that the output has behind those of `query`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    mask_meta: VarlenMaskMeta | None = None
    whole_mask: torch.Tensor | None = None
    replicated: tuple[int, int, int] = (0, 0, 0)
    seq_lens: Sequence[int] | None = None
    exchange: bool = True
    first_head: int = 0
    zero_rows: int = 0

    def misfit(self, geometry: LayerGeometry) -> UsageError | None:
        """Return why the tensors do not belong together or to the layer, or None.

        A rank may hold a share of the layer's heads: only the ratio of heads is fixed.
        """
        # Spelled out, because it is part of every call.
        q, k, v, mask, gate = self[:5]
        if not (
            isinstance(q, torch.Tensor)
            and isinstance(k, torch.Tensor)
            and isinstance(v, torch.Tensor)
            and (mask is None or isinstance(mask, torch.Tensor))
            and (gate is None or isinstance(gate, torch.Tensor))
        ):
            return _no_tensor({"query": q, "key": k, "value": v}, {"attn_mask": mask, "gate": gate})
        query, key, value = q.shape, k.shape, v.shape
        if (
            len(query) == len(key) == len(value) == 4
            and query[3] == key[3] == geometry.head_size
            and query[0] == key[0] == value[0]
            and query[2] * geometry.num_kv_heads == key[2] * geometry.num_heads
            and key[2] == value[2]
            and key[1] == value[1]
        ):
            return None
        return UsageError(
            f"q, k and v must be [B, Sq, H, D], [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv] with D = "
            f"{geometry.head_size} and {geometry.num_heads} query heads per "
            f"{geometry.num_kv_heads} key heads, got {list(query)}, {list(key)} and {list(value)}"
        )

    @property
    def autocasts(self) -> bool:
        """Whether autocast is on for the device of the tensors."""
        device = self.query.device.type
        # Asking about "meta" is an error, and torch cannot trace what tells such devices apart.
        return device != "meta" and torch.is_autocast_enabled(device)

    def autocast(self) -> "AttentionCall":
        """Cast as autocast does for torch's own attention: selection then sees what kernels get."""
        dtype = torch.get_autocast_dtype(self.query.device.type)
        # Autocast leaves doubles alone.
        query, key, value = (
            x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
            for x in self[:3]
        )
        return self._replace(query=query, key=key, value=value)

    @property
    def wants_gradient(self) -> bool:
        """Whether autograd records what is computed from the tensors."""
        # Spelled out: a generator would cost more than the rest of the call.
        return torch.is_grad_enabled() and (
            self.query.requires_grad
            or self.key.requires_grad
            or self.value.requires_grad
            or (self.mask is not None and self.mask.requires_grad)
            or (self.gate is not None and self.gate.requires_grad)
        )


def all_or_none(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: str,
    after: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the three tensors, or None when none is given; a part of them is an error."""
    if q is not None and k is not None and v is not None:
        return q, k, v
    if q is None and k is None and v is None:
        return None
    given = zip("qkv", (q, k, v), strict=True)
    missing = ", ".join(f"{before}{name}{after}" for name, x in given if x is None)
    raise UsageError(
        f"{before}q{after}, {before}k{after} and {before}v{after} must be given together, "
        f"missing {missing}"
    )


def check_seq_lens(
    seq_lens: list[int] | None, q: torch.Tensor, *, exclusive: bool, split: bool = False
) -> None:
    """Refuse `seq_lens` that do not describe this one device, or that exclude other inputs.

    Where tokens are split over several, those are compared with what they hold later on.
    """
    if seq_lens is None:
        return
    if exclusive:
        raise UsageError("seq_lens must not be combined with masks or replicated tokens")
    if not split and list(seq_lens) != [q.shape[1]]:
        raise UsageError(
            f"seq_lens must hold one length per device, here [{q.shape[1]}], got {list(seq_lens)}"
        )


def check_replicated(replicated: tuple[int, int, int], q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuse counts of replicated tokens that exceed the sequence or exclude each other."""
    if replicated == (0, 0, 0):
        return
    names = ("num_replicated_prefix", "num_replicated_suffix", "num_replicated_kv_prefix")
    limits = (q.shape[1], q.shape[1], k.shape[1])
    if sum(count != 0 for count in replicated) > 1:
        raise UsageError(
            f"at most one of {', '.join(names)} must be non-zero, got {list(replicated)}"
        )
    for name, count, limit in zip(names, replicated, limits, strict=True):
        if not 0 <= count <= limit:
            raise UsageError(f"{name} must be in [0, {limit}], got {count}")


def check_no_replicated(*replicated: torch.Tensor | None) -> None:
    """Refuse tokens that all ranks hold, where a layer has no place for them."""
    if any(x is not None for x in replicated):
        raise UsageError(
            "replicated_q, replicated_k and replicated_v must be None in UlyssesAttention_VSA; "
            "use UlyssesAttention for joint sequences"
        )


def check_split(has_prefix: bool, pre_exchanged: bool) -> None:
    """Refuse what cannot be honoured where tokens are split over ranks."""
    if has_prefix:
        raise UsageError(
            "q_prefix, k_prefix and v_prefix must be None where tokens are split over ranks; put "
            "tokens that all ranks hold in front and count them in num_replicated_prefix"
        )
    if pre_exchanged:
        raise UsageError(
            "qkv_pre_all_to_all must be False where tokens are split over ranks: heads that were "
            "exchanged before cannot be taken; pass the tokens of this rank"
        )


def check_mask_meta(
    meta: VarlenMaskMeta | None, attn_mask: torch.Tensor | None, k: torch.Tensor
) -> None:
    """Refuse a packing without its mask, or of another batch."""
    if meta is None:
        return
    if not isinstance(meta, VarlenMaskMeta):
        raise UsageError(
            f"attn_mask_meta must be what build_varlen_mask_meta returns, got a "
            f"{type(meta).__name__}"
        )
    if attn_mask is None:
        raise UsageError("attn_mask_meta must come with the attn_mask it packs, got no attn_mask")
    if meta.keep.shape != k.shape[:2]:
        raise UsageError(
            f"attn_mask_meta must pack [B, Sk] = {list(k.shape[:2])}, got {list(meta.keep.shape)}"
        )


def check_sizes(num_heads: int, head_size: int, num_kv_heads: int) -> None:
    """Refuse sizes no attention has."""
    sizes = {"num_heads": num_heads, "head_size": head_size, "num_kv_heads": num_kv_heads}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise ConfigError(f"{name} must be a whole number, got {size!r}")
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )


def check_numbers(softmax_scale: float | None, compute_dtype: torch.dtype | None) -> None:
    """Refuse a scale that makes every output NaN, and what is no dtype."""
    if softmax_scale is not None and (
        isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real)
    ):
        raise ConfigError(f"softmax_scale must be a number, got {softmax_scale!r}")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ConfigError(f"softmax_scale must be finite, got {softmax_scale}")
    if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
        raise ConfigError(
            f"compute_dtype must be a torch.dtype such as torch.bfloat16, got {compute_dtype!r}"
        )


def _no_tensor(needed: dict[str, object], optional: dict[str, object]) -> UsageError:
    """Return the error of the first argument that is no tensor; optional ones may be None."""
    given = {**needed, **{name: x for name, x in optional.items() if x is not None}}
    name, value = next(item for item in given.items() if not isinstance(item[1], torch.Tensor))
    return UsageError(
        f"{name} must be a torch.Tensor, got {type(value).__name__}; make it one with "
        f"torch.as_tensor"
    )
