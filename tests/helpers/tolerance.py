"""Error budgets derived from the inputs, so that no test carries a tuned tolerance.

A kernel in a given dtype may err at most twice as much as plain PyTorch code in that dtype does,
plus a rounding band:

    |kernel - fp64|  <=  2 * (|eager - fp64| + band)

Both sides are compared per query row, by the largest error over the channels: a single element of
the eager result may be exact by luck, a whole row is not. The band is what rounding the weights
and the output to the dtype can cost, eps * sum_j p_j |v_j|, plus what a score in fp32 can:
sqrt(D) + 3 roundings of the row's largest |score|, for the sum of D products in any order, the
scale, the change to base 2 and the subtraction of the maximum.

Kernels that quantise q, k or v to 8 bits or fewer cannot meet that; they are held to a cosine
similarity of at least 0.999 and a relative L1 error of at most 0.03, over the whole output. Those
that round all operands to e4m3 err more: twice as much as plain code that does, and 0.1, are the
most that they may be off in L2 norm.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tests.helpers.reference import e4m3_attention, eager_attention, reference_attention

_Attended: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]

QUANTISED_MIN_COSINE = 0.999
QUANTISED_MAX_RELATIVE_L1 = 0.03
E4M3_MAX_RELATIVE_L2 = 0.1


def assert_within_error_budget(
    actual: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    quantised: bool = False,
) -> None:
    """Raise AssertionError when an attention output errs more than its budget.

    Args:
        actual: output under test, [B, Sq, H, Dv].
        q: query it was computed from, [B, Sq, H, D].
        k: key, [B, Sk, Hkv, D].
        v: value, [B, Sk, Hkv, Dv].
        scale: softmax scale that should have been used.
        causal: whether bottom-right causality should have been used.
        mask: mask that should have been used, as in `reference_attention`.
        quantised: whether the kernel works on 8 bits or fewer.
    """
    q, k, v, actual = (x.detach() for x in (q, k, v, actual))
    values = torch.cat((v, v.abs()), dim=-1)
    found, _ = reference_attention(q, k, values, scale=scale, causal=causal, mask=mask)
    exact, weighted = found.chunk(2, dim=-1)
    assert actual.shape == exact.shape, f"shape is {list(actual.shape)}, want {list(exact.shape)}"
    assert actual.dtype == q.dtype, f"dtype is {actual.dtype}, want the query's {q.dtype}"
    if not actual.isfinite().all():
        count = int((~actual.isfinite()).sum())
        raise AssertionError(f"{count} of {actual.numel()} output elements are not finite")
    blind = (exact == 0).all(dim=-1)
    assert not actual[blind].any(), "rows that see no key must be zero"
    if quantised:
        _assert_close_enough_for_8_bits(actual.double(), exact)
        return
    eager = eager_attention(q, k, v, scale=scale, causal=causal, mask=mask)[0].double()
    step = torch.finfo(q.dtype).eps + _score_step(q, k, scale)
    band = step * weighted
    _assert_rows(actual.double() - exact, 2 * (_row_max(eager - exact) + _row_max(band)))


def assert_lse_within_error_budget(
    actual: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    quantised: bool = False,
) -> None:
    """Raise AssertionError when a natural log-sum-exp [B, H, Sq] errs more than its budget.

    Scores are sums of D exact products in fp32 or better, so the band is sqrt(D) roundings of the
    largest |score| and of the result. Kernels may evaluate exponentials to the inputs' precision
    only, which moves the logarithm of their sum by half an eps. On 8 bits a score errs by about one
    step of the quantiser: 1/127 of the row's range on either side.
    """
    q, k = q.detach(), k.detach()
    _, exact = reference_attention(q, k, k, scale=scale, causal=causal)
    assert actual.shape == exact.shape, f"shape is {list(actual.shape)}, want {list(exact.shape)}"
    assert actual.dtype == torch.float32, f"dtype is {actual.dtype}, want float32"
    blind = exact == -torch.inf
    assert (actual[blind] == -torch.inf).all(), "the lse of rows that see no key must be -inf"
    largest = abs(scale) * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    step = 2 / 127 if quantised else torch.finfo(torch.float32).eps * q.shape[-1] ** 0.5
    budget = 2 * step * (largest + exact[~blind].abs().max()) + torch.finfo(q.dtype).eps / 2
    error = (actual.double() - exact)[~blind].abs().max()
    assert error <= budget, f"lse errs by {error:.3e}, its budget is {budget:.3e}"


def assert_within_e4m3_budget(
    actual: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    by_head: bool = True,
) -> None:
    """Raise AssertionError when attention of operands in e4m3 errs more than its budget.

    Args:
        actual: output under test, [B, Sq, H, Dv].
        lse: natural log-sum-exp under test, [B, H, Sq], or None where there is none.
        q: query it was computed from, [B, Sq, H, D].
        k: key, [B, Sk, Hkv, D].
        v: value, [B, Sk, Hkv, Dv].
        scale: softmax scale that should have been used.
        causal: whether bottom-right causality should have been used.
        by_head: see `e4m3_attention`.
    """
    exact, exact_lse = reference_attention(q, k, v, scale=scale, causal=causal)
    plain, plain_lse = e4m3_attention(q, k, v, scale=scale, causal=causal, by_head=by_head)
    assert actual.shape == exact.shape, f"shape is {list(actual.shape)}, want {list(exact.shape)}"
    assert actual.dtype == q.dtype, f"dtype is {actual.dtype}, want the query's {q.dtype}"
    error, cost = (float((x.double() - exact).norm() / exact.norm()) for x in (actual, plain))
    budget = min(2 * cost, E4M3_MAX_RELATIVE_L2)
    assert error <= budget, f"the output errs by {error:.4f}, its budget is {budget:.4f}"
    blind = exact_lse == -torch.inf
    assert not actual.transpose(1, 2)[blind].any(), "rows that see no key must be zero"
    if lse is None:
        return
    assert lse.dtype == torch.float32, f"dtype is {lse.dtype}, want float32"
    assert (lse[blind] == -torch.inf).all(), "the lse of rows that see no key must be -inf"
    off, may = (float((x.double() - exact_lse)[~blind].abs().max()) for x in (lse, plain_lse))
    assert off <= 2 * may, f"the lse errs by {off:.4f}, its budget is {2 * may:.4f}"


def assert_gradients_within_error_budget(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], _Attended],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> None:
    """Raise AssertionError when the gradients of `attend` err more than their budget.

    Args:
        attend: function of q, k and v under test; returns the output, or that and the natural
            log-sum-exp [B, H, Sq], whose gradient then is not zero.
        q: query, [B, Sq, H, D].
        k: key, [B, Sk, Hkv, D].
        v: value, [B, Sk, Hkv, Dv].
        scale: softmax scale that should have been used.
        causal: whether bottom-right causality should have been used.
        mask: mask that should have been used, as in `reference_attention`.

    The budget of each gradient is that of the output, over the whole tensor: at most twice the
    largest error of plain PyTorch code in the same dtype, plus its band relative to the largest
    gradient.
    """
    q, k, v = (x.detach() for x in (q, k, v))
    options: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask}
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q)
    of_lse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator).to(q.device)
    _, exact_lse = reference_attention(q, k, v, **options)
    of_lse = of_lse.masked_fill(exact_lse == -torch.inf, 0.0)

    def gradients(
        function: Callable[..., _Attended], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        found = function(*leaves)
        results = (found,) if isinstance(found, torch.Tensor) else found
        both = (upstream, of_lse)[: len(results)]
        given = [x.to(y.dtype) for x, y in zip(both, results, strict=True)]
        return torch.autograd.grad(results, leaves, given)

    with torch.no_grad():
        found = attend(q, k, v)
    num = 1 if isinstance(found, torch.Tensor) else len(found)
    got = gradients(attend, q, k, v)
    exact = gradients(
        lambda *x: reference_attention(*x, **options)[:num], *(x.double() for x in (q, k, v))
    )
    eager = gradients(lambda *x: eager_attention(*x, **options)[:num], q, k, v)
    step = torch.finfo(q.dtype).eps + _score_step(q, k, scale).max()
    for name, mine, theirs, plain in zip("qkv", got, exact, eager, strict=True):
        band = step * theirs.abs().max()
        budget = 2 * ((plain.double() - theirs).abs().max() + band)
        error = (mine.double() - theirs).abs().max()
        assert error <= budget, (
            f"the gradient of {name} errs by {error:.3e}, its budget is {budget:.3e}"
        )


def _score_step(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the rounding of the scores of each row, [B, Sq, H, 1]."""
    keys = k.double().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = scale * (q.double().transpose(1, 2) @ keys.mT)
    precision = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    largest = scores.abs().amax(dim=-1, keepdim=True).transpose(1, 2)
    return precision * (q.shape[-1] ** 0.5 + 3) * largest


def _row_max(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(dim=-1)


def _assert_rows(error: torch.Tensor, budget: torch.Tensor) -> None:
    row_error = _row_max(error)
    excess = row_error - budget
    if not (excess > 0).any():
        return
    worst = int(excess.flatten().argmax())
    b, s, h = (int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
    raise AssertionError(
        f"{int((excess > 0).sum())} of {excess.numel()} rows exceed their error budget; the worst "
        f"is batch {b}, token {s}, head {h}: error {row_error[b, s, h]:.3e}, "
        f"budget {budget[b, s, h]:.3e}"
    )


def _assert_close_enough_for_8_bits(actual: torch.Tensor, exact: torch.Tensor) -> None:
    cosine = torch.nn.functional.cosine_similarity(actual.flatten(), exact.flatten(), dim=0)
    relative_l1 = (actual - exact).abs().sum() / exact.abs().sum()
    assert cosine >= QUANTISED_MIN_COSINE, (
        f"cosine similarity is {cosine:.6f}, must be at least {QUANTISED_MIN_COSINE}"
    )
    assert relative_l1 <= QUANTISED_MAX_RELATIVE_L1, (
        f"relative L1 error is {relative_l1:.4f}, must be at most {QUANTISED_MAX_RELATIVE_L1}"
    )
