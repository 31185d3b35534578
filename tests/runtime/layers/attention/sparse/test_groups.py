"""A router that groups tokens by the signs of two channels: what any such router gets."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest
import torch

from multimodal_gen.kernels.kmeans.api import Clusters
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.sparse.base import Tail, tail_option
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import recorded_pairs
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import Budget, Cut, Router
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.sparse import joint_mask, text_places, video_tokens
from tests.helpers.tail import pooled_attention
from tests.helpers.tolerance import assert_within_error_budget

GRID = (3, 5, 7)
HEADS, SIZE, KINDS = 4, 16, 4
SCALE = SIZE**-0.5
TEXTS = text_places(GRID, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignConfig(SparseConfig):
    topk: int = option(2, "groups that each keeps", ge=1)
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: str = option("auto", "kernel that runs")


def kind_of(x: torch.Tensor) -> torch.Tensor:
    """Return the group of every token; of the four, one is empty."""
    return (x[..., 0] > 0).long() + (x[..., 1] > 0)


def side(x: torch.Tensor, token_mask: torch.Tensor | None) -> Clusters:
    x = x.transpose(1, 2)
    kind = kind_of(x)
    if token_mask is not None:
        kind = torch.where(token_mask[:, None], kind, KINDS)
    of_kind = (kind.unsqueeze(-1) == torch.arange(KINDS)).float()  # [B, H, S, C]
    counts = of_kind.sum(2)
    clean = torch.where((kind < KINDS).unsqueeze(-1), x, 0.0)
    centroids = of_kind.mT @ clean.float() / counts.clamp_min(1).unsqueeze(-1)
    return Clusters(
        centroids=centroids,
        order=kind.argsort(dim=2, stable=True).int(),
        starts=(counts.cumsum(2) - counts).int(),
        counts=counts.int(),
    )


class SignRouter(Router[SignConfig]):
    chooses = "map"

    def cut(self, settings, grid):
        return Cut.groups()

    def group(self, settings, query, key, token_mask, context):
        return side(query, token_mask), side(key, token_mask)

    def budget(self, settings, blocks, tokens):
        return Budget(settings.topk, blocks, settings.topk / blocks)

    def choose(self, settings, stats, budget):
        # Alike for all heads and entries: what broadcasts is taken.
        return best(budget.kept)[None, None]


def best(kept: int) -> torch.Tensor:
    """Return which groups each keeps: itself and those before it, going around."""
    distance = torch.arange(KINDS)[:, None] - torch.arange(KINDS)
    return distance % KINDS < kept


class SignBackend(SparseBackend):
    backend: ClassVar = AttentionBackendEnum.CUBE_SPARSE_ATTN
    summary: ClassVar = "groups by sign"
    config_cls: ClassVar = SignConfig
    router: ClassVar = SignRouter
    variants: ClassVar = ()


def impl_of(kv_heads=HEADS, **parameters):
    config = SignConfig(**parameters)
    cls = SignBackend.get_impl_cls()
    return cls(HEADS, SIZE, SCALE, False, kv_heads, config=config, variant="reference")


def inputs(text: TextSpan | None, kv_heads: int):
    tokens = 105 + (text.length if text else 0)
    return make_qkv(2, tokens, HEADS, SIZE, num_kv_heads=kv_heads)


def mask_of(qkv, text, token_mask, kept=2):
    """Return the pairs that are kept, by definition, and the groups of every head's keys."""
    query, key, _ = qkv
    video = video_tokens(GRID, text)
    group = HEADS // key.shape[2]
    mask = torch.zeros(2, HEADS, query.shape[1], key.shape[1], dtype=torch.bool)
    rule = best(kept)
    for b, h in product(range(2), range(HEADS)):
        rows, columns = kind_of(query[b, :, h]), kind_of(key[b, :, h // group])
        mask[b, h] = rule[rows][:, columns]
        if token_mask is not None:
            mask[b, h, ~token_mask[b]] = True
    mask = joint_mask(mask, video, token_mask)

    def blocks(b, h):
        kinds = kind_of(key[b, :, h // group])
        real = [t for t in video if token_mask is None or token_mask[b, t]]
        return [[t for t in real if kinds[t] == kind] for kind in range(KINDS)]

    return mask, blocks


def run(impl, qkv, text=None, token_mask=None):
    with set_forward_context(3, latent_grid=GRID, text_span=text) as context:
        mask = None if token_mask is None else token_mask[:, None, None]
        return impl.forward(*qkv, context, attn_mask=mask)


@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_groups_attend_with_text_masks_and_shared_heads(where, masked, kv_heads):
    text, token_mask = TEXTS[where], None
    qkv = inputs(text, kv_heads)
    if masked:
        token_mask = torch.ones(qkv.key.shape[:2], dtype=torch.bool)
        token_mask[1, ::4] = False
    impl = impl_of(kv_heads)
    out = run(impl, qkv, text, token_mask)
    mask, _ = mask_of(qkv, text, token_mask)
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)
    (density,) = impl.layer.densities.by_step().values()
    pairs = mask.sum() if token_mask is None else (mask & token_mask[:, None, None]).sum()
    whole = mask[:, 0].numel() if token_mask is None else mask.shape[2] * int(token_mask.sum())
    assert abs(density - float(pairs) / HEADS / whole) < 1e-9


@pytest.mark.parametrize("where", TEXTS)
def test_groups_that_are_not_kept_count_by_their_means(where):
    text = TEXTS[where]
    qkv = inputs(text, 2)
    out = run(impl_of(2, tail="pooled"), qkv, text)
    mask, blocks = mask_of(qkv, text, None)
    want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video_tokens(GRID, text))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_what_rows_keep_is_told_in_the_order_of_the_sequence():
    text = TEXTS["text first"]
    qkv = inputs(text, 2)
    with recorded_pairs() as told:
        run(impl_of(2), qkv, text)
    (pairs,) = told
    rows = torch.arange(qkv.query.shape[1])
    assert torch.equal(pairs.of_rows(rows, slice(0, HEADS)), mask_of(qkv, text, None)[0])


def test_a_share_that_is_far_from_what_was_asked_for_is_warned_of(caplog):
    run(impl_of(topk=2), inputs(TEXTS["text last"], HEADS), TEXTS["text last"])
    assert "text" not in caplog.text
    long = TextSpan(start=105, length=60)
    run(impl_of(topk=1), inputs(long, HEADS), long)
    assert "60 of 165 tokens are text, which is never left out" in caplog.text


def test_too_much_that_is_kept_makes_the_next_steps_dense():
    impl, qkv = impl_of(topk=4, dense_above=0.5), inputs(None, HEADS)
    run(impl, qkv)
    with set_forward_context(4, latent_grid=GRID) as context:
        reason = impl.dense_reason(*qkv, context)
    assert reason is not None
    assert "kept more than 0.5 of the pairs when last tried" in reason


def test_groups_have_no_size_in_plans_and_are_of_one_call_and_one_process():
    assert SignBackend.block_sizes(None) == (0, 0)
    assert impl_of().limits.cache == "its groups are of the keys of one call"
    assert impl_of().limits.ring == "its groups are of all tokens of a head"
