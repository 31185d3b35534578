"""The guard where ranks share a sequence: they see the same errors, and decide together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from multimodal_gen.runtime.attention_report import GuardMiss
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.generator.attention_check import (
    error_in_ring,
    row_errors,
    sample_rows,
    sampled,
)
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.eight_bits import allow_on_cpus
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import World, own
from tests.runtime.generator.test_attention_guard import (
    GRID,
    HEADS,
    SIZE,
    TILES,
    beyond_the_range,
    inputs,
    one_large_channel,
    truth,
)

# Meshes of two ranks, and the tokens of each.
SPLITS = [(Mesh(ulysses=2), (96, 96)), (Mesh(ring=2), (96, 96)), (Mesh(ring=2), (130, 62))]
FOUR = (Mesh(ulysses=2, ring=2), (50, 46, 48, 48))
STEPS = 4


def guarded(
    count: int, guard: AttentionGuard | None, heads: int = HEADS, **asked: Any
) -> list[USPAttention]:
    """Return the self-attention of a denoiser that may be split."""
    layers = []
    for index in range(count):
        name = f"blocks.{index}"
        site = LayerSite(name=name, component="transformer", layer=index, num_layers=count)
        scope = scope_from(**asked)
        layers.append(
            USPAttention(heads, SIZE, compute_dtype=torch.bfloat16, site=site, scope=scope)
        )
        layers[-1].guard = guard
    return layers


def run(
    guard: AttentionGuard,
    layers: Sequence[USPAttention],
    given: Sequence[Sequence[torch.Tensor]],
    **options: Any,
) -> list[list[torch.Tensor]]:
    """Return what the layers give this rank in each step, as denoiser calls compute it."""
    found = []
    for step in range(STEPS):
        with set_forward_context(step, latent_grid=GRID, request_id="one"):
            guard.settle()
            found.append([layer(*x, **options) for layer, x in zip(layers, given, strict=True)])
    return found


def error_of(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def save(
    lengths: Sequence[int], hard: str, head_groups: int | None
) -> tuple[list[GuardMiss], list[GuardMiss], list[list[float]]]:
    """Return what one process misses, what this rank does, and its errors by layer and step."""
    whole = [inputs(), {"range": beyond_the_range, "channel": one_large_channel}[hard]()]
    copies = head_groups or 1  # heads that are exchanged in groups are several on each rank
    whole = [tuple(torch.cat([x] * copies, dim=2) for x in each) for each in whole]
    found: list[list[GuardMiss]] = []
    groups = parallel_groups()
    assert groups is not None
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        for among in (None, replace(groups, head_groups=head_groups)):
            guard = AttentionGuard(GuardBounds())
            layers = guarded(2, guard, copies * HEADS, attention_backend="sage_attn")
            given = [[own(x, lengths) for x in each] for each in whole] if among else whole
            with use_parallel_groups(among):
                outs = run(guard, layers, given)
            found.append(list(guard.report().missed))
        (plain,) = guarded(1, None, copies * HEADS, attention_backend="sage_attn")
        unguarded = plain(*given[1])
    exact = [own(truth(*each), lengths) for each in whole]
    errors = [[error_of(step[i], exact[i]) for step in outs] for i in range(2)]
    assert error_of(unguarded, exact[1]) > 0.05
    report = layers[1].report()
    (miss,) = found[-1]
    assert [entry.calls for entry in report.entries] == [miss.step + 1]
    assert [detour.calls for detour in report.detours] == [STEPS - miss.step - 1]
    return found[0], found[1], errors


def check_saved(results: list[Any]) -> None:
    """Check that all ranks served the second layer exactly from the same call on."""
    (alone,) = results[0][0]
    (miss,) = results[0][1]
    assert all(missed == [miss] for _, missed, _ in results), "the same layer, step and error"
    assert (miss.layer, miss.step, miss.dense) == (1, alone.step, False)
    assert miss.error is not None
    assert miss.error > 0.05
    for _, _, (easy, wrong) in results:
        assert max(easy) < 0.05
        assert min(wrong[: miss.step + 1]) > 0.05, "as without a guard"
        assert max(wrong[miss.step + 1 :]) < 0.01


@pytest.mark.parametrize("hard", ["range", "channel"])
@pytest.mark.parametrize(("mesh", "lengths"), SPLITS, ids=str)
def test_ranks_save_the_same_layer_from_the_same_call_on(
    two_ranks: World, mesh: Mesh, lengths: tuple[int, ...], hard: str
) -> None:
    results = two_ranks.run(mesh, save, lengths, hard, None)
    check_saved(results)
    if mesh.ring == 1:  # heads are rounded as on one GPU
        (alone,), (miss,), _ = results[0]
        assert miss == alone


def test_so_do_four_ranks_in_rings_and_groups(four_ranks: World) -> None:
    mesh, lengths = FOUR
    check_saved(four_ranks.run(mesh, save, lengths, "channel", None))


def test_heads_may_be_exchanged_in_groups(two_ranks: World) -> None:
    check_saved(two_ranks.run(Mesh(ulysses=2), save, (96, 96), "channel", 2))


def overflow(lengths: Sequence[int], backend: str, exchange: bool) -> tuple[Any, list[float]]:
    """Return what missed, and the errors of this rank, whose calls overflow on the second alone."""
    groups = parallel_groups()
    assert groups is not None
    x = inputs()
    guard = AttentionGuard(GuardBounds(quantized=10.0))
    config = TILES if backend == "sliding_tile_attn" else None
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        asked = {"attention_backend": backend, "attention_backend_config": config}
        (layer,) = guarded(1, guard, **asked)
        cls: type[AttentionImpl] = type(layer.attn_impl)
        for name in ("forward", "forward_lse", "forward_ring"):
            if groups.rank == 1 and hasattr(cls, name):
                patch.setattr(cls, name, overflowing(getattr(cls, name)))
        given = [own(each, lengths) for each in x] if exchange else x
        outs = run(guard, [layer], [given], skip_sequence_parallel_override=not exchange)
    exact = own(truth(*x), lengths) if exchange else truth(*x)
    return guard.report().missed, [error_of(step[0], exact) for step in outs]


def overflowing(serve: Any) -> Any:
    """Return what serves a call as `serve` does, with one number that is not finite."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = serve(*args, **kwargs)
        (found[0] if isinstance(found, tuple) else found)[0, -1, 0, 0] = torch.inf
        return found

    return wrong


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize(("mesh", "lengths"), SPLITS[:2], ids=str)
def test_what_is_not_finite_on_one_rank_is_computed_again_and_exact_on_all(
    two_ranks: World, mesh: Mesh, lengths: tuple[int, ...], exchange: bool
) -> None:
    results = two_ranks.run(mesh, overflow, lengths, "sage_attn", exchange)
    for missed, errors in results:
        assert [(miss.error, miss.step) for miss in missed] == [(None, 0)]
        assert max(errors[1:]) < 0.004, "as 16 bits are"
        assert errors[0] < 0.02, "as 8 bits are, where it was finite"


def overflow_of_sums(lengths: Sequence[int]) -> tuple[Any, list[float]]:
    """Return what missed, and the errors of this rank, of whose parts the sums alone overflow."""
    x, guard = inputs(), AttentionGuard(GuardBounds(quantized=10.0))
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        (layer,) = guarded(1, guard, attention_backend="sage_attn")
        cls: type[AttentionImpl] = type(layer.attn_impl)
        forward_lse = cls.forward_lse

        def overflows(*args: Any, **kwargs: Any) -> Any:
            out, lse = forward_lse(*args, **kwargs)
            lse[0, 0, -1] = torch.inf
            return out, lse

        patch.setattr(cls, "forward_lse", overflows)
        outs = run(guard, [layer], [[own(each, lengths) for each in x]])
    exact = own(truth(*x), lengths)
    return guard.report().missed, [error_of(step[0], exact) for step in outs]


def test_sums_of_a_part_that_overflow_are_computed_again(two_ranks: World) -> None:
    for missed, errors in two_ranks.run(Mesh(ring=2), overflow_of_sums, (96, 96)):
        assert [(miss.error, miss.step) for miss in missed] == [(None, 0)]
        assert max(errors) < 0.004, "as 16 bits are"


def hidden(lengths: Sequence[int], which: int, masked: bool) -> Any:
    """Return the report of calls whose rounding hides that a query or a key is not finite."""
    x, guard = inputs(), AttentionGuard(GuardBounds())
    compared = (sample_rows(sum(lengths), seed=step).tolist() for step in range(STEPS))
    place = max({*range(sum(lengths))}.difference(*compared))
    x[which][0, place] = torch.nan
    mask = own((torch.arange(sum(lengths)) != place).expand(1, -1), lengths)[:, None, None]
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        (layer,) = guarded(1, guard, attention_backend="sage_attn")
        cls: type[AttentionImpl] = type(layer.attn_impl)
        forward_lse = cls.forward_lse

        def hides(impl: Any, *given: torch.Tensor) -> Any:
            return forward_lse(impl, *(each.nan_to_num() for each in given))

        patch.setattr(cls, "forward_lse", hides)
        given = [*(own(each, lengths) for each in x), *([mask] if masked else [])]
        outs = run(guard, [layer], [given])
    assert all(step[0].isfinite().all() for step in outs)
    return guard.report()


@pytest.mark.parametrize(("which", "masked"), [(0, False), (1, False), (0, True)])
def test_what_rounding_hides_in_a_ring_is_told_on_all_ranks(
    two_ranks: World, which: int, masked: bool
) -> None:
    for report in two_ranks.run(Mesh(ring=2), hidden, (96, 96), which, masked):
        assert report.missed == ()
        told = [] if masked else [(0, 0)]  # a query that a mask leaves out may be padding
        assert [(found.layer, found.step) for found in report.senseless] == told


def padded(lengths: Sequence[int]) -> Any:
    """Return the report of calls that 8 bits cannot serve, and whose padding is not finite."""
    guard, x = AttentionGuard(GuardBounds()), one_large_channel()
    keep = torch.arange(sum(lengths)).expand(1, -1) < 150
    for each in x:
        each[:, 150:] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        (layer,) = guarded(1, guard, attention_backend="sage_attn")
        run(guard, [layer], [[own(each, lengths) for each in (*x, keep)]])
    return guard.report()


@pytest.mark.parametrize("mesh", [Mesh(ring=2), Mesh(ulysses=2)], ids=str)
def test_padding_may_hold_anything_on_every_rank(two_ranks: World, mesh: Mesh) -> None:
    for report in two_ranks.run(mesh, padded, (96, 96)):
        assert report.senseless == ()
        assert [miss.error is not None for miss in report.missed] == [True]


def causal(lengths: Sequence[int]) -> Any:
    """Return the report of calls that are causal."""
    guard = AttentionGuard(GuardBounds())
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        scope = scope_from(attention_backend="sage_attn")
        layer = USPAttention(HEADS, SIZE, causal=True, site=site, scope=scope)
        layer.guard = guard
        run(guard, [layer], [[own(each, lengths) for each in inputs()]])
    return guard.report()


def test_causal_calls_of_a_ring_are_told_as_unchecked(two_ranks: World) -> None:
    for report in two_ranks.run(Mesh(ring=2), causal, (96, 96)):
        assert report.unchecked == {"they are causal, in a ring": STEPS}
    for report in two_ranks.run(Mesh(ulysses=2), causal, (96, 96)):
        assert report.unchecked == {}
        assert report.calls == STEPS


def branches() -> tuple[Any, float]:
    """Return what missed on either branch, and the error of this one in the next generation.

    The second rank's first call alone is one that 8 bits cannot serve. The first rank makes two
    calls in a step.
    """
    groups = parallel_groups()
    assert groups is not None
    guard, x = AttentionGuard(GuardBounds()), inputs()
    with pytest.MonkeyPatch.context() as patch:
        allow_on_cpus(patch)
        (layer,) = guarded(1, guard, attention_backend="sage_attn")
        with set_forward_context(0, latent_grid=GRID, request_id="one"):
            for _ in range(2 - groups.rank):
                guard.settle()
                layer(*(one_large_channel() if groups.rank else x))
        with set_forward_context(0, latent_grid=GRID, request_id="two"):
            guard.settle()
            out = layer(*x)
    return guard.report().missed, error_of(out, truth(*x))


def test_branches_of_guidance_tell_each_other_once_in_a_step(two_ranks: World) -> None:
    first, second = two_ranks.run(Mesh(cfg=2), branches)
    assert first[0] == second[0]
    assert [(miss.layer, miss.step) for miss in first[0]] == [(0, 0)]
    assert max(first[1], second[1]) < 0.004, "as 16 bits are"


def unknown_error(of_rank: int) -> Any:
    """Return what missed, where the error on one rank is too large to be computed."""
    groups = parallel_groups()
    assert groups is not None
    guard, yes = AttentionGuard(GuardBounds()), torch.tensor(True)
    miss = GuardMiss(
        component=None,
        name="blocks.0",
        role=AttentionRole.SELF,
        layer=0,
        step=0,
        error=None,
        bound=0.05,
        dense=False,
    )
    error = torch.tensor(torch.nan if groups.rank == of_rank else 0.25)
    guard._note(miss, error, yes, yes)
    return guard.report().missed


@pytest.mark.parametrize("of_rank", [0, 1])
def test_an_error_that_one_rank_does_not_know_hides_none_of_another(
    two_ranks: World, of_rank: int
) -> None:
    for missed in two_ranks.run(Mesh(ulysses=2), unknown_error, of_rank):
        assert [miss.error for miss in missed] == [0.25]


def test_sparse_methods_in_a_ring_are_dense_from_the_next_call_on(two_ranks: World) -> None:
    results = two_ranks.run(Mesh(ring=2), overflow, (96, 96), "sliding_tile_attn", True)
    for missed, errors in results:
        assert [(miss.error, miss.step, miss.dense) for miss in missed] == [(None, 0, True)]
        assert max(errors[1:]) < 0.004
    assert not results[1][1][0] < torch.inf, "what the ring gave stays as it was"


def sparse(lengths: Sequence[int], backend: str, bound: float | None) -> tuple[Any, list[float]]:
    """Return what missed a bound of sparse methods, and the errors of this rank by step."""
    x = inputs()
    guard = AttentionGuard(GuardBounds(sparse=bound))
    config = TILES if backend == "sliding_tile_attn" else {"topk": 1}
    (layer,) = guarded(1, guard, attention_backend=backend, attention_backend_config=config)
    outs = run(guard, [layer], [[own(each, lengths) for each in x]])
    return guard.report().missed, [error_of(out, own(truth(*x), lengths)) for (out,) in outs]


@pytest.mark.parametrize("backend", ["sliding_tile_attn", "video_sparse_attn"])
@pytest.mark.parametrize(("mesh", "lengths"), SPLITS, ids=str)
def test_sparse_methods_that_miss_their_bound_are_dense_on_all_ranks(
    two_ranks: World, mesh: Mesh, lengths: tuple[int, ...], backend: str
) -> None:
    first, second = two_ranks.run(mesh, sparse, lengths, backend, 0.1)
    assert first[0] == second[0]
    assert [(miss.step, miss.dense) for miss in first[0]] == [(0, True)]
    for _, errors in (first, second):
        assert errors[0] > 0.1
        assert max(errors[1:]) < 0.01
    for missed, errors in two_ranks.run(mesh, sparse, lengths, backend, None):
        assert missed == ()
        assert min(errors) > 0.1


class Spy:
    """Keeps the error of a call whose output is made wrong, head by head."""

    reason = "a test asked for it"

    def __init__(self, layer: USPAttention) -> None:
        self.layer = layer
        self.found: list[float] = []

    def part(self, attend: Any, exact: Any) -> Any:
        del exact
        return attend

    def ring(self, inputs: RingInputs, lengths: Sequence[int], out: torch.Tensor) -> None:
        wrong = spoilt(out, inputs.first_head)
        error, sane = error_in_ring(self.layer, inputs, lengths, wrong, 3)
        assert sane
        self.found.append(float(error))


def spoilt(out: torch.Tensor, first_head: int) -> torch.Tensor:
    """Return an output that is the more wrong, the higher the head; the last row most of all."""
    heads = 1.0 + first_head + torch.arange(out.shape[2], dtype=out.dtype)
    return out + 0.01 * heads[:, None] * out.abs().sqrt()


def errors_in_a_ring(lengths: Sequence[int], text: dict[str, int], masked: bool) -> None:
    """Compare what a rank of a ring is told with what one process finds over the same rows."""
    groups = parallel_groups()
    assert groups is not None
    front, in_front, back = (text.get(f"num_replicated_{n}", 0) for n in WHERE)
    rows, keys = (front + sum(lengths) + back + more for more in (0, in_front))
    whole = make_qkv(2, rows, 4, 8, num_keys=keys, num_kv_heads=2, dtype=torch.float64)
    keep = torch.arange(2 * keys).view(2, -1) % 3 != 1
    keep[1, keys // 3 :] = False
    mask = keep[:, None, None] if masked else None
    layer = USPAttention(4, 8, 2)
    with use_parallel_groups(None):
        out = spoilt(layer(*whole, mask, **text), 0)
        wanted = row_errors(*sampled(layer, AttentionCall(*whole, mask), out, 3))[1].max()
    fronts = (front, front + in_front, front + in_front)
    local = [own(x, lengths, f, back) for x, f in zip(whole, fronts, strict=True)]
    shared = own(keep, lengths, front + in_front, back)[:, None, None] if masked else None
    spy = Spy(layer)
    layer.guard = lambda layer, serve, call: serve(call._replace(check=spy))
    layer(*local, shared, **text)
    assert spy.found == pytest.approx([float(wanted)], rel=1e-6)


WHERE = ("prefix", "kv_prefix", "suffix")
TEXTS = [{}, {"num_replicated_prefix": 3}, {"num_replicated_kv_prefix": 70}]
TEXTS += [{"num_replicated_suffix": 90}]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("text", TEXTS, ids=str)
@pytest.mark.parametrize("lengths", [(40, 57), (0, 97)])
def test_every_rank_of_a_ring_gets_the_error_of_one_process(
    two_ranks: World, lengths: tuple[int, ...], text: dict[str, int], masked: bool
) -> None:
    two_ranks.run(Mesh(ring=2), errors_in_a_ring, lengths, text, masked)
