"""VSA-H3 through the layer: text that competes, its coarse stage, and FastVideo's code."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention import LocalAttention, UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import recorded_pairs
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import QKV, random
from tests.helpers.methods import DEFINED, Defined, best, drawn_call, picks, tiles
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    assert_same_gradients,
    kept_pairs,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tolerance import assert_within_error_budget

H3 = DEFINED["vsa h3"]
TEXTS = text_places(H3.grid, 150)  # pieces of 64, 64 and 22


def pieces_of(grid, text: TextSpan | None, size: int) -> list[list[int]]:
    """Return the positions of every piece of text."""
    tokens = [] if text is None else list(range(text.start, text.stop))
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def means_of(x: torch.Tensor, blocks, token_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of every block's tokens that count, float64 [B, H, N, D]; NaN for none."""
    found = x.new_full((x.shape[0], x.shape[2], len(blocks), x.shape[3]), torch.nan).double()
    for b, (n, block) in product(range(len(x)), enumerate(blocks)):
        real = [t for t in block if token_mask is None or token_mask[b, t]]
        if real:
            found[b, :, n] = x[b, real].double().mean(0).to(x.dtype).double()
    return found


@dataclass(frozen=True, kw_only=True)
class Competing(Defined):
    """The method where text competes: pieces of it are blocks as tiles are."""

    kept: int
    size: int = 64

    def mask(
        self,
        qkv: QKV,
        text: TextSpan | None = None,
        token_mask: torch.Tensor | None = None,
        **rule: Any,
    ) -> torch.Tensor:
        """Return which token attends to which: the best of all blocks, and all for text."""
        pieces = pieces_of(self.grid, text, self.size)
        rows = self.cut(self.grid, text)[0]
        blocks = [*rows, *pieces]
        batch, tokens, heads, _ = qkv.query.shape
        mask = torch.ones(batch, heads, tokens, tokens, dtype=torch.bool)
        mask[:, :, video_tokens(self.grid, text)] = False
        queries, keys = (means_of(x, blocks, token_mask) for x in qkv[:2])
        for b, h, (i, row) in product(range(batch), range(heads), enumerate(rows)):
            scores = (keys[b, h * keys.shape[1] // heads] @ queries[b, h, i]).nan_to_num(-math.inf)
            for j in scores.argsort(descending=True)[: self.kept + len(pieces)].tolist():
                mask[b, h, torch.tensor(row)[:, None], torch.tensor(list(blocks[j]))] = True
        return mask if token_mask is None else mask & token_mask[:, None, None, :]


def case_of(grid, kept: float, *, compete: bool) -> Defined:
    """Return the method on a grid, at a share of the tiles."""
    cut = tiles(*(min(4, n) for n in grid))
    blocks = tokens_of_tiles(grid, (4, 4, 4))
    count = max(1, math.ceil(round(kept * 1000) * len(blocks) / 1000))
    given = {**H3.method.given, "sparsity": round(1 - kept, 3)}
    method = replace(H3.method, given=given)
    fields = {"method": method, "cut": cut, "choose": partial(best, kept=count), "grid": grid}
    if not compete:
        return replace(H3, varied=cut, **fields)
    method = replace(method, given={**given, "vsa_mode": "compete"})
    size = math.prod(min(4, n) for n in grid)
    return Competing(**{**fields, "method": method}, varied=cut, kept=count, size=size)


def drawn(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case in which text is exempt: a grid, a share, text, samples, key heads, a mask."""
    pick = picks(seed)
    grid = (pick(2, 6), pick(3, 9), pick(4, 10))
    case = case_of(grid, pick(1, 19) / 20, compete=False)
    return case, drawn_call(case, pick, without=slice(None))


def drawn_competing(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case in which text competes; there is more text, and no tail."""
    pick = picks(seed)
    grid = (pick(2, 6), pick(3, 9), pick(4, 10))
    case = case_of(grid, pick(1, 15) / 20, compete=True)
    call = drawn_call(case, pick, without=slice(None))
    text = text_places(grid, pick(1, 150))[("text first", "text last")[pick(0, 1)]]
    qkv = case.inputs(text, batch=len(call["qkv"].query), kv_heads=pick(1, 2))
    token_mask = None
    if pick(0, 2) == 0:
        tokens, lost = qkv.key.shape[1], pick(2, 6)
        token_mask = torch.arange(len(qkv.key) * tokens).view(-1, tokens) % lost != 1
    return case, {"text": text, "qkv": qkv, "token_mask": token_mask}


@pytest.mark.parametrize("some", range(10))
def test_drawn_cases_with_competing_text_are_those_of_the_definition(some: int) -> None:
    for seed in range(10 * some, 10 * some + 10):
        case, given = drawn_competing(seed)
        with recorded_pairs() as told:
            layer, _, mask = case.check(**given)
        if given["token_mask"] is None:
            (entry,) = layer.report().entries
            assert entry.density == pytest.approx(float(mask.double().mean()), abs=1e-6)
            rows = torch.arange(0, mask.shape[2], 7)
            if told:  # else all of it is dense
                assert torch.equal(kept_pairs(told, rows, mask), mask[:, :, rows])


def of_fastvideo(
    qkv: QKV, gate: torch.Tensor, prefix: int, grid, sparsity: float, *, exempt: bool
) -> torch.Tensor:
    """Return what FastVideo's `MiniMaxH3VSAImpl` does: [B, S, H, D] in float64.

    A copy of its formulas, for a prefix of one segment.
    """
    span = TextSpan(start=0, length=prefix) if prefix else None
    blocks = [*pieces_of(grid, span, 64), *tokens_of_tiles(grid, (4, 4, 4), span)]
    num_prefix = -(-prefix // 64)
    num_video = len(blocks) - num_prefix
    pooled = [torch.stack([x[:, t].double().mean(1) for t in blocks], 2) for x in qkv]
    scores = pooled[0] @ pooled[1].mT / qkv.query.shape[3] ** 0.5
    kept = max(1, min(math.ceil((1 - sparsity) * num_video), num_video))
    mask = torch.zeros_like(scores, dtype=torch.bool)
    if exempt or num_prefix == 0:
        found = scores[..., num_prefix:].topk(kept, dim=-1).indices + num_prefix
        mask.scatter_(-1, found, True)
        mask[..., :num_prefix] = True
    else:
        mask.scatter_(-1, scores.topk(kept + num_prefix, dim=-1).indices, True)
    mask[:, :, :num_prefix] = True
    own = torch.empty(qkv.query.shape[1], dtype=torch.int64)
    for n, block in enumerate(blocks):
        own[list(block)] = n
    out, _ = reference_attention(*qkv, scale=H3.scale, mask=mask[:, :, own][..., own])
    coarse = (scores.softmax(-1) @ pooled[2]).transpose(1, 2)[:, own]
    return out + gate.double() * coarse


def gated(parameters: Mapping[str, Any], qkv: QKV, grid, gate, text, **known: Any) -> torch.Tensor:
    method = replace(H3.method, given=parameters, layer_cls=UlyssesAttention_VSA)
    layer = method.layer(kv_heads=qkv.key.shape[2], **known.pop("given", {}))
    return run_sparse(layer, qkv, grid, text=text, gate_compress=gate, **known)


@pytest.mark.parametrize("mode", ["exempt", "compete"])
@pytest.mark.parametrize("prefix", [0, 40, 150])
def test_it_computes_what_fastvideo_does(mode: str, prefix: int) -> None:
    grid = (5, 9, 10)
    text = TextSpan(start=0, length=prefix) if prefix else None
    case = case_of(grid, 0.25, compete=False)
    qkv = case.inputs(text, kv_heads=2, batch=2)
    gate = random(*qkv.query.shape, seed=3)
    given = {"dense_above": 1.0, "VSA_sparsity": 0.75, "vsa_mode": mode}
    out = gated(given, qkv, grid, gate, text)
    want = of_fastvideo(qkv, gate, prefix, grid, 0.75, exempt=mode == "exempt")
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("some", range(10))
def test_drawn_gates_weigh_the_coarse_stage_of_video_and_text(some: int) -> None:
    for seed in range(10 * some, 10 * some + 10):
        pick = picks(seed)
        grid = (pick(2, 6), pick(4, 9), pick(4, 10))  # tiles of 4 x 4, so pieces of 64 or fewer
        grid = (max(grid[0], 4), *grid[1:])
        prefix, share = pick(0, 150), pick(1, 19) / 20
        text = TextSpan(start=0, length=prefix) if prefix else None
        qkv = case_of(grid, share, compete=False).inputs(text, kv_heads=2)
        gate = random(*qkv.query.shape, seed=seed)
        mode, sparsity = ("exempt", "compete")[pick(0, 1)], round(1 - share, 3)
        given = {"dense_above": 1.0, "sparsity": sparsity, "vsa_mode": mode}
        out = gated(given, qkv, grid, gate, text)
        want = of_fastvideo(qkv, gate, prefix, grid, sparsity, exempt=mode == "exempt")
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5, msg=str(seed))


def test_without_a_gate_and_with_exempt_text_it_is_video_sparse_attention() -> None:
    text = TEXTS["text last"]
    qkv = H3.inputs(text)
    vsa = replace(DEFINED["vsa"].method, given={"dense_above": 1.0})
    outs = [
        run_sparse(method.layer(kv_heads=1, sparsity=0.8), qkv, H3.grid, text=text)
        for method in (H3.method, vsa)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("mode", ["exempt", "compete"])
def test_gradients_flow_through_what_is_kept_and_the_coarse_stage(mode: str) -> None:
    grid, prefix = (4, 4, 12), 70
    text = TextSpan(start=0, length=prefix)
    qkv = case_of(grid, 0.34, compete=False).inputs(text, kv_heads=2)
    gate = random(*qkv.query.shape, seed=3)
    given = {"dense_above": 1.0, "sparsity": 0.66, "vsa_mode": mode}

    def layer(q, k, v, g):
        return gated(given, QKV(q, k, v), grid, g, text)

    def definition(q, k, v, g):
        return of_fastvideo(QKV(q, k, v), g, prefix, grid, 0.66, exempt=mode == "exempt")

    assert_same_gradients(layer, definition, *qkv, gate)


@pytest.mark.parametrize(
    ("given", "step", "kept"),
    [
        ({"vsa_dense_first_n_steps": 2}, 1, 1.0),
        ({"vsa_dense_first_n_steps": 2}, 2, 0.25),
        ({"vsa_dense_layers": [0, 3]}, 2, 1.0),
        ({"vsa_dense_layers": "1-3"}, 2, 0.25),
    ],
)
@pytest.mark.parametrize("mode", ["exempt", "compete"])
def test_dense_steps_and_layers_keep_the_coarse_stage(mode, given, step, kept) -> None:
    prefix, text = 150, TEXTS["text first"]
    qkv = H3.inputs(text, kv_heads=2)
    gate = random(*qkv.query.shape, seed=3)
    given = {"sparsity": 0.75, "vsa_mode": mode, **given}
    out = gated(given, qkv, H3.grid, gate, text, step=step)
    want = of_fastvideo(qkv, gate, prefix, H3.grid, 1 - kept, exempt=mode == "exempt")
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("named", "told"), [({"vsa_dense_layers": "0-2"}, 0), ({"sparsity": 0}, 1)]
)
def test_layers_that_are_named_to_keep_all_are_no_mistake(named, told, caplog) -> None:
    layer = replace(H3.method, given={"sparsity": 0.75, **named}).layer()
    qkv = H3.inputs(None, kv_heads=2)
    with torch.no_grad(), set_forward_context(0, latent_grid=H3.grid, num_steps=2):
        layer(*qkv)
    assert caplog.text.count("leaves nothing out") == told


def test_text_that_competes_may_be_left_out_and_text_leaves_out_nothing() -> None:
    case, text = case_of(H3.grid, 0.25, compete=True), TEXTS["text first"]
    _, _, mask = case.check(text, qkv=case.inputs(text, kv_heads=2))
    video = video_tokens(H3.grid, text)
    assert not mask[:, :, video][..., : text.length].all()
    assert mask[:, :, : text.length].all()


def test_half_precision_errs_within_its_budget_where_text_competes() -> None:
    case, text = case_of(H3.grid, 0.25, compete=True), TEXTS["text last"]
    qkv = case.inputs(text, dtype=torch.bfloat16)
    out = run_sparse(case.method.layer(kv_heads=1, dtype=torch.bfloat16), qkv, case.grid, text=text)
    assert_within_error_budget(out, *qkv, scale=case.scale, mask=case.mask(qkv, text))


def test_text_that_competes_has_no_tail_and_no_ring() -> None:
    with pytest.raises(ConfigError, match="`tail` of video_sparse_attn_h3 must be none with vsa_m"):
        H3.method.config(vsa_mode="compete", tail="pooled")
    backend = find_backend(AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3, PlatformEnum.CPU)
    limits = backend.limits(H3.method.config(vsa_mode="compete"))
    assert limits.ring == "`vsa_mode` compete ranks pieces of text, whose means no ring exchanges"
    assert limits.cache is None  # which has no text
    assert backend.limits(H3.method.config()) == type(limits)()


def test_names_and_defaults_are_those_of_sglang() -> None:
    method = replace(H3.method, given={})
    given = {
        "VSA_sparsity": 0.9,
        "vsa_mode": "exempt",
        "vsa_dense_first_n_steps": 0,
        "vsa_tile_size": 64,
    }
    assert method.config(**given) == method.config()
    with pytest.raises(ConfigError, match="vsa_tile_size"):
        method.config(vsa_tile_size=32)


@pytest.mark.parametrize(
    ("size", "tile"), [(64, (4, 4, 4)), (128, (4, 4, 8)), (256, (4, 8, 8))], ids=str
)
def test_tiles_have_the_shapes_of_fastvideo(size: int, tile: tuple[int, int, int]) -> None:
    grid, text = (5, 9, 17), TEXTS["text first"]
    cut = tiles(*tile)
    case = replace(H3, grid=grid, cut=cut, varied=cut, choose=partial(best, kept=2))
    case.check(text, sparsity=1 - 1.5 / len(tokens_of_tiles(grid, tile)), vsa_tile_size=size)


def test_rules_give_windows_to_some_layers_and_vsa_to_the_others() -> None:
    page = Path(__file__).resolve().parents[6] / "docs/pages/methods/video_sparse_attn_h3.md"
    (rules,) = re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    scope = scope_from(attention_config=yaml.safe_load(rules), strict=True)
    backends = [
        LocalAttention(2, 32, site=LayerSite(name=f"blocks.{i}.attn", layer=i), scope=scope).backend
        for i in (0, 9, 10)
    ]
    windows, h3 = (
        AttentionBackendEnum.STATIC_SPARSE_ATTN,
        AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3,
    )
    assert backends == [windows, windows, h3]
