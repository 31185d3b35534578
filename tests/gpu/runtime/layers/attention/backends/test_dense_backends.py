"""Every cell of the support table on this machine's GPU, generated from the declarations.

Each "yes" runs against float64; each "no" is refused with its reason. One line per group says what
ran.
"""

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.registry import (
    all_backends,
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.tolerance import (
    assert_gradients_within_error_budget,
    assert_lse_within_error_budget,
    assert_within_e4m3_budget,
    assert_within_error_budget,
)

BATCH, NUM_HEADS, SCALE = 2, 4, 0.2
QUERIES, MORE_KEYS = 203, 299
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Of a range of head sizes: its limits, common sizes and one that is no power of two.
SIZES = (8, 40, 64, 128, 256)
# These compile every new combination for seconds: all features run at one dtype and head size, the
# other dtypes and head sizes run the plain call, and the backward of those that list their sizes.
COMPILED_PER_CALL = frozenset({"flex_attn", "fa4", "fa4_fwd", "fa4_sm100", "sage1"})
QUANTISED = frozenset({AttentionBackendEnum.SAGE_ATTN, AttentionBackendEnum.SAGE_ATTN_3})


@dataclass(frozen=True)
class Group:
    """One variant at one dtype and head size."""

    backend: type[AttentionBackend]
    variant: Variant
    dtype: torch.dtype
    head_size: int
    every_feature: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.backend.backend}-{self.variant.name}-{dtype}-{self.head_size}"

    @property
    def quantised(self) -> bool:
        """Whether every kernel of the backend works on 8 bits or fewer."""
        return self.backend.backend in QUANTISED

    @property
    def scales(self) -> dict[str, bool]:
        """How operands in e4m3 are scaled: cuDNN takes one scale for each tensor."""
        return {"by_head": self.backend.backend is not AttentionBackendEnum.TORCH_CUDNN_SDPA}

    def features(self) -> list[Feature]:
        """Return the features to run beside the plain call."""
        chosen = set(RUNS) if self.every_feature else set()
        if self.variant.head_sizes.listed:
            chosen.add(Feature.BACKWARD)
        return [f for f in RUNS if f in chosen & self.variant.features]

    def impl(self, *, causal: bool = False, num_kv_heads: int = NUM_HEADS) -> AttentionImpl:
        """Return the implementation under test."""
        return self.backend.get_impl_cls()(
            NUM_HEADS, self.head_size, SCALE, causal, num_kv_heads, variant=self.variant.name
        )

    def inputs(self, num_queries: int, num_keys: int, num_kv_heads: int = NUM_HEADS) -> QKV:
        """Return inputs that are views with gaps, as slices of a fused projection are."""
        qkv = make_qkv(
            BATCH,
            num_queries,
            NUM_HEADS,
            self.head_size,
            num_keys=num_keys,
            num_kv_heads=num_kv_heads,
            dtype=self.dtype,
            device="cuda",
        )
        return QKV(*(torch.cat((x, x), dim=2)[:, :, : x.shape[2]] for x in qkv))

    def check(self, out: torch.Tensor, qkv: QKV, **expected: object) -> None:
        """Assert that `out` is within the budget."""
        if self.variant.operand_bits == 8:
            assert_within_e4m3_budget(out, None, *qkv, scale=SCALE, **self.scales, **expected)
            return
        assert_within_error_budget(out, *qkv, scale=SCALE, quantised=self.quantised, **expected)


def usable() -> Iterator[tuple[type[AttentionBackend], Variant]]:
    """Yield the dense variants that run on this machine."""
    environment = current_environment()
    for name in all_backends():
        backend = find_backend(name, environment.platform)
        if name.is_sparse:
            continue
        for variant in backend.variants:
            if not variant.unsupported_reasons(request_for(variant)):
                yield backend, variant


def request_for(variant: Variant) -> AttentionRequest:
    """Return a request whose dtype, head size, role and features suit `variant`."""
    return AttentionRequest(
        environment=current_environment(),
        head_size=sizes_of(variant.head_sizes)[0],
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        dtype=next(dtype for dtype in DTYPES if dtype in variant.dtypes),
        role=min(variant.roles, key=str),
    )


def sizes_of(head_sizes: HeadSizes) -> tuple[int, ...]:
    """Return the head sizes to run, the common one first."""
    sizes = head_sizes.listed or tuple(
        size for size in {*SIZES, head_sizes.minimum, head_sizes.maximum} if size in head_sizes
    )
    return tuple(sorted(sizes, key=lambda size: (size != 128, size)))


def groups() -> Iterator[Group]:
    """Yield every group to run."""
    if not torch.cuda.is_available():
        return
    for backend, variant in usable():
        dtypes = [dtype for dtype in DTYPES if dtype in variant.dtypes]
        sizes = sizes_of(variant.head_sizes)
        for dtype in dtypes:
            for size in sizes:
                first = (dtype, size) == (dtypes[0], sizes[0])
                if variant.name not in COMPILED_PER_CALL or first:
                    yield Group(backend, variant, dtype, size, every_feature=True)
                elif dtype is dtypes[0] or size == sizes[0]:
                    yield Group(backend, variant, dtype, size, every_feature=False)


def run_plain(group: Group) -> None:
    for keys in (QUERIES, MORE_KEYS):
        qkv = group.inputs(QUERIES, keys)
        group.check(group.impl().forward(*qkv), qkv)


def run_gqa(group: Group) -> None:
    for kv_heads in (2, 1):
        qkv = group.inputs(QUERIES, QUERIES, kv_heads)
        group.check(group.impl(num_kv_heads=kv_heads).forward(*qkv), qkv)


def run_causal(group: Group) -> None:
    for queries, keys in ((QUERIES, QUERIES), (QUERIES, MORE_KEYS), (MORE_KEYS, QUERIES)):
        qkv = group.inputs(queries, keys)
        group.check(group.impl(causal=True).forward(*qkv), qkv, causal=True)
    if Feature.GQA in group.variant.features:
        qkv = group.inputs(QUERIES, MORE_KEYS, 2)
        out = group.impl(causal=True, num_kv_heads=2).forward(*qkv)
        group.check(out, qkv, causal=True)


def keep(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4).cuda()


def run_mask(group: Group, mask: torch.Tensor) -> None:
    qkv = group.inputs(QUERIES, MORE_KEYS)
    group.check(group.impl().forward(*qkv, attn_mask=mask), qkv, mask=mask)
    # Layers fold causality into a mask, so only variants with dense masks see both.
    if {Feature.GQA, Feature.CAUSAL, Feature.DENSE_MASK} <= group.variant.features:
        qkv = group.inputs(QUERIES, MORE_KEYS, 2)
        out = group.impl(causal=True, num_kv_heads=2).forward(*qkv, attn_mask=mask)
        group.check(out, qkv, causal=True, mask=mask)


def run_key_mask(group: Group) -> None:
    mask = keep(BATCH, 1, 1, MORE_KEYS)
    mask[1] = False  # a sample without keys
    run_mask(group, mask)


def run_dense_mask(group: Group) -> None:
    mask = keep(BATCH, NUM_HEADS, QUERIES, MORE_KEYS)
    mask[0, 1, 3] = False  # a row without keys
    run_mask(group, mask)
    additive = torch.randn(1, NUM_HEADS, QUERIES, MORE_KEYS, dtype=group.dtype, device="cuda")
    run_mask(group, additive.masked_fill(~mask[:1], -math.inf))


def run_lse(group: Group) -> None:
    quantised, features = group.quantised, group.variant.features
    shapes = [(QUERIES, MORE_KEYS, NUM_HEADS, False)]
    if Feature.GQA in features:
        shapes.append((QUERIES, MORE_KEYS, 2, False))
    if Feature.CAUSAL in features:
        shapes += [(QUERIES, MORE_KEYS, NUM_HEADS, True), (MORE_KEYS, QUERIES, NUM_HEADS, True)]
    for queries, keys, kv_heads, causal in shapes:
        q, k, v = group.inputs(queries, keys, kv_heads)
        out, lse = group.impl(causal=causal, num_kv_heads=kv_heads).forward_lse(q, k, v)
        if group.variant.operand_bits == 8:
            expected = {"scale": SCALE, "causal": causal, **group.scales}
            assert_within_e4m3_budget(out, lse, q, k, v, **expected)
            continue
        group.check(out, QKV(q, k, v), causal=causal)
        assert_lse_within_error_budget(lse, q, k, scale=SCALE, causal=causal, quantised=quantised)


def run_varlen(group: Group) -> None:
    for causal in (False, True) if Feature.CAUSAL in group.variant.features else (False,):
        q, k, v = group.inputs(QUERIES, MORE_KEYS)
        lengths = ((QUERIES - 30, QUERIES), (MORE_KEYS - 50, MORE_KEYS))
        packed = [
            torch.cat([x[0, : ns[0]], x[1], x[0, ns[0] :]])
            for x, ns in ((q, lengths[0]), (k, lengths[1]), (v, lengths[1]))
        ]
        starts = [torch.tensor([0, a, a + b], dtype=torch.int32, device="cuda") for a, b in lengths]
        out = group.impl(causal=causal).forward_varlen(
            *packed,
            cu_seqlens_q=starts[0],
            cu_seqlens_k=starts[1],
            max_seqlen_q=QUERIES,
            max_seqlen_k=MORE_KEYS,
        )
        assert out.shape == packed[0].shape
        first = 0
        for i, (nq, nk) in enumerate(zip(*lengths, strict=True)):
            sample = QKV(q[i, :nq][None], k[i, :nk][None], v[i, :nk][None])
            group.check(out[first : first + nq][None], sample, causal=causal)
            first += nq


def run_backward(group: Group) -> None:
    for causal in (False, True) if Feature.CAUSAL in group.variant.features else (False,):
        impl = group.impl(causal=causal)
        qkv = group.inputs(QUERIES, QUERIES)
        assert_gradients_within_error_budget(impl.forward, *qkv, scale=SCALE, causal=causal)


RUNS = {
    Feature.GQA: run_gqa,
    Feature.CAUSAL: run_causal,
    Feature.KEY_MASK: run_key_mask,
    Feature.DENSE_MASK: run_dense_mask,
    Feature.LSE: run_lse,
    Feature.VARLEN: run_varlen,
    Feature.BACKWARD: run_backward,
}


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{text} ")


@pytest.mark.parametrize("group", list(groups()), ids=str)
def test_every_declared_cell_is_within_its_error_budget(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = ["plain"]
    with warnings.catch_warnings():
        if group.variant.packages:
            warnings.simplefilter("ignore")  # what other packages warn of is not ours to mend
        run_plain(group)
        for feature in group.features():
            RUNS[feature](group)
            ran.append(str(feature))
    say(capsys, f"ran {group}: {' '.join(ran)}")


@pytest.mark.parametrize(
    "variant",
    [v for _, v in usable()] if torch.cuda.is_available() else [],
    ids=lambda v: v.name,
)
def test_every_undeclared_cell_is_refused(
    variant: Variant, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_for(variant)
    refused = []
    for dtype in DTYPES:
        if dtype not in variant.dtypes:
            assert variant.unsupported_reasons(replace(request, dtype=dtype))
            refused.append(str(dtype).removeprefix("torch."))
    for size in (*range(1, 34), *SIZES, 512, (variant.head_sizes.maximum or 0) + 8):
        if size not in variant.head_sizes:
            assert variant.unsupported_reasons(replace(request, head_size=size))
            refused.append(str(size))
    for feature in Feature:
        if feature not in variant.features:
            assert f"does not support {feature}" in variant.unsupported_reasons(
                request.with_needs(feature)
            )
            refused.append(str(feature))
    say(capsys, f"refused by {variant.name}: {' '.join(refused) or 'nothing is undeclared'}")
