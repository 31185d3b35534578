"""Calls every dense backend must honour, and stand-ins for packages that are not installed here.

A stand-in has the real function's signature, computes with the fp64 reference under the package's
own conventions, and asserts what the package demands; a dropped argument then changes the result.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Environment, Feature
from multimodal_gen.runtime.platforms import DeviceCapability, PlatformEnum
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import (
    assert_lse_within_error_budget,
    assert_within_e4m3_budget,
    assert_within_error_budget,
)

SCALE = 0.2  # neither 1 nor head_size ** -0.5 of any size used here
NUM_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention call."""

    num_queries: int
    num_keys: int
    num_kv_heads: int
    causal: bool

    @property
    def needs(self) -> frozenset[Feature]:
        """Features the call needs."""
        features = set()
        if self.num_kv_heads != NUM_HEADS:
            features.add(Feature.GQA)
        if self.causal:
            features.add(Feature.CAUSAL)
        return frozenset(features)

    def inputs(self, head_size: int, dtype: torch.dtype) -> QKV:
        """Return inputs that are views with gaps, as slices of a fused projection are."""
        qkv = make_qkv(
            2,
            self.num_queries,
            NUM_HEADS,
            head_size,
            num_keys=self.num_keys,
            num_kv_heads=self.num_kv_heads,
            dtype=dtype,
        )
        return QKV(*(torch.cat((x, x), dim=2)[:, :, : x.shape[2]] for x in qkv))


CALLS = {
    f"{sq}x{sk}-kv{kv}-{'causal' if causal else 'full'}": Call(
        num_queries=sq, num_keys=sk, num_kv_heads=kv, causal=causal
    )
    for sq, sk in ((24, 24), (16, 40), (40, 16))
    for kv in (4, 2, 1)
    for causal in (False, True)
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.fixture
def make_impl() -> Callable[..., AttentionImpl]:
    def make(
        backend: type[AttentionBackend], variant: str, call: Call, head_size: int
    ) -> AttentionImpl:
        return backend.get_impl_cls()(
            NUM_HEADS, head_size, SCALE, call.causal, call.num_kv_heads, variant=variant
        )

    return make


@pytest.fixture
def assert_honours(make_impl: Callable[..., AttentionImpl]) -> Callable[..., None]:
    """Return a check that a variant gives what it declares for a call."""

    def check(
        backend: type[AttentionBackend],
        variant: str,
        call: Call,
        *,
        head_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        quantised: bool = False,
    ) -> None:
        features = next(v.features for v in backend.variants if v.name == variant)
        assert call.needs <= features, "declare what the test calls"
        impl = make_impl(backend, variant, call, head_size)
        q, k, v = call.inputs(head_size, dtype)
        kept = k.clone()
        expected = {"scale": SCALE, "causal": call.causal}
        out = impl.forward(q, k, v)
        assert_within_error_budget(out, q, k, v, **expected, quantised=quantised)
        if Feature.LSE in features:
            out, lse = impl.forward_lse(q, k, v)
            assert_within_error_budget(out, q, k, v, **expected, quantised=quantised)
            assert_lse_within_error_budget(lse, q, k, **expected, quantised=quantised)
        if Feature.VARLEN in features:
            _check_varlen(impl, q, k, v, call)
        assert torch.equal(k, kept), "the caller's key must stay as it was"

    return check


def _check_varlen(
    impl: AttentionImpl, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> None:
    """Pack two samples without the last tokens of the first, with rows after the last segment."""
    lengths_q, lengths_k = ((length - 3, length) for length in (call.num_queries, call.num_keys))
    parts = [
        [x[i, :n] for i, n in enumerate(ns)]
        for x, ns in zip((q, k, v), (lengths_q, lengths_k, lengths_k), strict=True)
    ]
    tail = q.new_ones(3, 1, 1)
    packed = [torch.cat([*ps, tail.expand(3, *ps[0].shape[1:])]) for ps in parts]
    starts = [torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in (lengths_q, lengths_k)]
    out = impl.forward_varlen(
        *packed,
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=call.num_queries,
        max_seqlen_k=call.num_keys,
    )
    assert out.shape == packed[0].shape
    first = 0
    for sample, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        inputs = (q[sample, :nq][None], k[sample, :nk][None], v[sample, :nk][None])
        rows = out[first : first + nq][None]
        assert_within_error_budget(rows, *inputs, scale=SCALE, causal=call.causal)
        first += nq


@pytest.fixture
def assert_honours_in_e4m3(make_impl: Callable[..., AttentionImpl]) -> Callable[..., None]:
    """Return the same check for a variant that rounds all operands to e4m3."""

    def check(
        backend: type[AttentionBackend], variant: str, call: Call, dtype: torch.dtype, **more: bool
    ) -> None:
        impl = make_impl(backend, variant, call, 64)
        qkv = call.inputs(64, dtype)
        expected = {"scale": SCALE, "causal": call.causal, **more}
        assert_within_e4m3_budget(impl.forward(*qkv), None, *qkv, **expected)
        assert_within_e4m3_budget(*impl.forward_lse(*qkv), *qkv, **expected)

    return check


@pytest.fixture
def fake_package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a function that makes a module with the given attributes importable."""

    def install(dotted: str, **attributes: Any) -> ModuleType:
        parts = dotted.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    parent = sys.modules[".".join(parts[: end - 1])]
                    monkeypatch.setattr(parent, parts[end - 1], module, raising=False)
        for name, value in attributes.items():
            monkeypatch.setattr(sys.modules[dotted], name, value, raising=False)
        return sys.modules[dotted]

    return install


@pytest.fixture
def compute() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return [B, S, H, D] attention in the inputs' dtype, with its natural log-sum-exp."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = reference_attention(q, k, v, scale=scale, causal=causal)
        return out.to(q.dtype), lse.float()

    return run


@pytest.fixture
def compute_packed(
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., torch.Tensor]:
    """Return packed [T, H, D] attention; rows after the last segment come back as NaN."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        scale: float,
        causal: bool,
    ) -> torch.Tensor:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        out = torch.full_like(q, torch.nan)
        for i in range(len(cu_seqlens_q) - 1):
            a, b = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
            c, d = int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1])
            out[a:b] = compute(q[None, a:b], k[None, c:d], v[None, c:d], scale, causal)[0][0]
        return out

    return run


def takes(signature: str) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Give a stand-in the signature of what it stands in for; it gets what was bound to that."""

    def decorate(attend: Callable[[Any], Any]) -> Callable[..., Any]:
        shape = inspect.signature(eval(f"lambda {signature}: None"))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = shape.bind(*args, **kwargs)
            bound.apply_defaults()
            return attend(SimpleNamespace(**bound.arguments))

        return call

    return decorate


@pytest.fixture
def flash_package(
    fake_package: Callable[..., ModuleType],
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    compute_packed: Callable[..., torch.Tensor],
) -> Callable[..., None]:
    """Return a function that makes a package of the family of FlashAttention importable.

    It takes the signatures of its two functions, what is returned for a call, its output and its
    log-sum-exp, which packed sequences have none of, and the conditions that every call meets.
    """

    def install(
        package: str,
        *,
        answer: Callable[[Any, torch.Tensor, torch.Tensor | None], Any],
        holds: Callable[[Any], bool] = lambda call: True,
        dense: str | None = None,
        packed: str,
    ) -> None:
        def attend(call: Any) -> Any:
            assert holds(call)
            out, lse = compute(call.q, call.k, call.v, call.softmax_scale, call.causal)
            return answer(call, out, lse)

        def attend_packed(call: Any) -> Any:
            assert holds(call)
            lengths = call.cu_seqlens_q, call.cu_seqlens_k
            qkv = call.q, call.k, call.v
            out = compute_packed(*qkv, *lengths, call.softmax_scale, call.causal)
            return answer(call, out, None)

        functions = {"flash_attn_varlen_func": takes(packed)(attend_packed)}
        if dense is not None:
            functions["flash_attn_func"] = takes(dense)(attend)
        fake_package(package, **functions)

    return install


@pytest.fixture
def request_on() -> Callable[..., AttentionRequest]:
    """Return a request on a simulated machine: platform, capability and installed packages."""

    def build(
        platform: PlatformEnum,
        *,
        capability: tuple[int, int] | None = None,
        packages: tuple[tuple[str, str, str], ...] = (),
        head_size: int = 64,
        num_kv_heads: int = NUM_HEADS,
        dtype: torch.dtype = torch.bfloat16,
        needs: tuple[Feature, ...] = (),
    ) -> AttentionRequest:
        environment = Environment(
            platform=platform,
            capability=DeviceCapability(*capability) if capability else None,
            packages=frozenset(packages),
        )
        return AttentionRequest(
            environment=environment,
            head_size=head_size,
            num_heads=NUM_HEADS,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            needs=frozenset(needs),
        )

    return build
