"""Exact attention of a few query rows, and how far what ran is from it.

A few rows cost little: R of S query rows take R / S of the products of dense attention, in fp64,
and one pass over the keys and values. So what a layer ran can be checked while it runs.

Shapes: B batch, S tokens, R sampled rows, H query heads, Hkv key heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.distributed.collectives import all_reduce
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.kinds.masks import KeyMask, normalise_mask
from multimodal_gen.runtime.layers.attention.masks import bottom_right_causal_mask, zero_masked_rows
from multimodal_gen.runtime.layers.attention.report import Json, LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.managers.forward_context import current_forward_context

ROWS = 64
"""Query rows that are recomputed of a call."""

# What copies of keys, values and scores of a few heads may take.
_BYTES_AT_ONCE = 256 << 20


def sample_rows(
    num_rows: int, seed: int, count: int = ROWS, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return `count` of `num_rows` rows, or all where they are fewer: int64, in order.

    Rows are drawn, not spaced evenly: the tiles of sparse methods are spaced evenly, too. Which
    they are does not depend on the device, and nothing waits for it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randperm(num_rows, generator=generator, device="cpu")[:count].sort().values
    return drawn.to(device, non_blocking=True)


def exact_rows(
    layer: AttentionLayer,
    call: AttentionCall,
    rows: torch.Tensor,
    values: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return exact attention of some query rows.

    Args:
        layer: whose call it is.
        call: the call, as it is served.
        rows: int64 [R], which queries, on the call's device.
        values: what to attend to instead of the call's values, each [B, Sk, Hkv, D].

    Returns:
        [B, R, H, D] for each of `values`: fp64, or fp32 on devices without it. Rows that see no key
        are zero.
    """
    dtype = _exact_dtype(call.query.device)
    mask = mask_of(layer, call)
    if isinstance(mask, KeyMask):  # what masked keys hold, even NaN, has no influence
        values = [zero_masked_rows(value, mask.tokens) for value in values]
    found: list[list[torch.Tensor]] = [[] for _ in values]
    for heads in head_slices(call, rows, values):
        weights = exact_weights(layer, call, rows, heads)
        for value, parts in zip(values, found, strict=True):
            v = value[:, :, heads].to(dtype).transpose(1, 2).unsqueeze(2)  # [B, h, 1, Sk, D]
            parts.append((weights @ v).flatten(1, 2).transpose(1, 2))
    return tuple(torch.cat(parts, dim=2) for parts in found)


def exact_weights(
    layer: AttentionLayer, call: AttentionCall, rows: torch.Tensor, heads: slice
) -> torch.Tensor:
    """Return the weights of exact attention for some query rows and key heads.

    Args:
        layer: whose call it is.
        call: the call, as it is served.
        rows: int64 [R], which queries, on the call's device.
        heads: which key heads.

    Returns:
        [B, h, H / Hkv, R, Sk] in fp64, or fp32 on devices without it; all 0 for rows without keys.
    """
    scores = _exact_scores(layer, call, rows, heads)
    if call.sink_logits is None:
        weights = scores.softmax(-1)
    else:  # a key that every row sees, and that has no value
        own = call.sink_logits[call.first_head : call.first_head + call.query.shape[2]]
        sinks = own.to(scores.dtype).view(-1, scores.shape[2], 1, 1)[heads]
        joined = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = joined.softmax(-1)[..., :-1]
    # Of rows that see no key, all scores are -inf; NaN stays NaN.
    weights = torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, weights)
    mask = mask_of(layer, call)
    if isinstance(mask, KeyMask) and mask.covers_queries:
        weights = torch.where(mask.tokens[:, None, None, rows, None], weights, 0.0)
    return weights


def _exact_scores(
    layer: AttentionLayer, call: AttentionCall, rows: torch.Tensor, heads: slice
) -> torch.Tensor:
    """Return the scores that `exact_weights` weighs by; -inf where a row does not see a key."""
    query, key = call.query, call.key
    dtype, group = _exact_dtype(query.device), query.shape[2] // key.shape[2]
    shape = (len(query), len(rows), key.shape[2], group, query.shape[3])
    q = query[:, rows].reshape(shape)[:, :, heads]
    q = q.to(dtype)
    k = key[:, :, heads].to(dtype)
    scores = q.permute(0, 2, 3, 1, 4) @ k.permute(0, 2, 3, 1).unsqueeze(2)
    scores = scores * layer.geometry.softmax_scale
    mask = mask_of(layer, call)
    if mask is not None:
        scores = _masked(scores, mask, rows, heads)
    if layer.geometry.causal:
        allowed = bottom_right_causal_mask(query.shape[1], key.shape[1], query.device)[rows]
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores


def row_errors(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return how far rows are from the truth, per head; does not wait for the device.

    Args:
        found: [B, R, H, D].
        truth: [B, R, H, D] in a dtype to compute in.

    Returns:
        [3, H]: relative L1 and relative L2 error, and the mean cosine over rows. Where the truth is
        zero, an error that is none counts as 0, and the cosine of a row as 1; a row of zeros that
        should be something else has a cosine of 0.
    """
    found = found.to(truth.dtype)
    error = (found - truth).transpose(0, 2).flatten(1)  # [H, R * B * D]
    whole = truth.transpose(0, 2).flatten(1)
    l1 = _ratio(error.abs().sum(1), whole.abs().sum(1))
    l2 = _ratio(error.square().sum(1).sqrt(), whole.square().sum(1).sqrt())
    whole_rows = truth.norm(dim=-1)
    lengths = found.norm(dim=-1) * whole_rows
    missing = torch.where(whole_rows == 0, 1.0, 0.0).to(truth.dtype)
    cosines = torch.where(lengths == 0, missing, (found * truth).sum(-1) / lengths)
    return torch.stack((l1, l2, cosines.mean((0, 1))))


def sampled(
    layer: AttentionLayer, call: AttentionCall, out: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some rows of an output, and exact attention of them: [B, R, H, D] each.

    Args:
        layer: whose call it is.
        call: the call, in the dtype that kernels get or as `torch.autocast` is to change it.
        out: its output, [B, S, H, D].
        step: the denoising step, which draws the rows.
    """
    seen = call.autocast()
    rows = sample_rows(call.query.shape[1], seed=step, device=out.device)
    (truth,) = exact_rows(layer, seen, rows, (seen.value,))
    return out[:, rows], truth


def error_in_ring(
    layer: AttentionLayer, inputs: RingInputs, lengths: Sequence[int], out: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far some rows of a call are from the truth whose keys travel round a ring.

    They are the rows of `sampled`, and every rank of the ring gets the same: each attends with all
    of them to the keys that it has, and the parts are merged. Nothing waits for the device.

    Args:
        layer: whose call it is; not causal.
        inputs: what this rank brought to the ring.
        lengths: queries of each rank of the ring that are not on all ranks.
        out: what the ring gave this rank, [B, prefix + S + suffix, H, D].
        step: the denoising step, which draws the rows.

    Returns:
        The relative L2 error of the worst head of this rank, and whether the truth is finite; 0-d.
    """
    group, device, dtype = inputs.call.group, out.device, _exact_dtype(out.device)
    rows, here, count = _rows_of_rank(inputs, lengths, step)
    batch, _, num_heads, size = inputs.query.shape
    query = torch.zeros(batch, count, num_heads, size, dtype=dtype, device=device)
    query[:, rows] = inputs.query[:, here].to(dtype)
    all_reduce(query, group)
    parts = [_exact_part(layer, part) for part in _held(inputs, query)]
    top = query.new_full((batch, num_heads, count), -torch.inf)
    for each, _ in parts:
        top = torch.maximum(top, each)
    top = all_reduce(top, group, largest=True)
    total = query.new_zeros(batch, num_heads, count, inputs.value.shape[3] + 1)
    for each, weighed in parts:
        total += weighed * _exp(each.unsqueeze(-1), top)
    all_reduce(total, group)
    values, weights = total[..., :-1], total[..., -1:]
    truth = torch.where(weights == 0, 0.0, values / weights)  # of rows that see no key
    wanted, found = truth[:, :, rows], out[:, here].transpose(1, 2)
    squares = torch.stack([x.square().sum((0, 2, 3)) for x in (found - wanted, wanted)])
    error = _ratio(*all_reduce(squares, group).sqrt())
    return error.max(), truth.isfinite().all()


def sees_own_keys(call: AttentionCall) -> bool:
    """Whether a call sees its own keys as its mask says, with neither a cache nor blocks."""
    return call.cache is None and call.block_mask is None


def projects(layer: AttentionLayer, call: AttentionCall) -> bool:
    """Whether a trained projection weighs a branch that a call adds to attention."""
    if layer.projection is None or call.exact or call.no_grid:
        return False
    return "projection" in layer.entry_for(call.autocast().query).primary.impl.takes


def step_of_turn(site: LayerSite, at_once: int) -> int | None:
    """Return the running step if self-attention of a layer is checked at it, or None.

    Args:
        site: the layer.
        at_once: how many layers of each component have their turn at a step.
    """
    context = current_forward_context()
    if context is None or site.role is not AttentionRole.SELF or site.layer is None:
        return None
    step = context.current_timestep
    turn = (site.layer - step * at_once) % (site.num_layers or 1)
    return step if turn < at_once else None


def layer_density(report: LayerReport) -> float:
    """Return the share of pairs that a layer attended to, mean over its calls; 1 for dense ones."""
    entries = [entry for entry in (*report.entries, *report.detours) if entry.calls]
    calls = sum(entry.calls for entry in entries)
    shares = (entry.calls * (1.0 if entry.density is None else entry.density) for entry in entries)
    return sum(shares) / calls if calls else 1.0


class AttentionCheck:
    """Recomputes some calls of every denoising step exactly on sampled rows, as a `Watch`.

    The layers take turns from step to step. Of the calls of a layer at a step, the first is taken
    that gives attention and nothing else. Nothing waits for the device before the results are read.

    Args:
        calls_per_step: how many self-attention calls of each component are checked at a step.
    """

    def __init__(self, calls_per_step: int) -> None:
        self._calls_per_step = calls_per_step
        # By layer and step; None where calls gave more or less than attention.
        self._found: dict[tuple[str | None, str], dict[int, torch.Tensor | None]] = {}

    def __call__(
        self,
        layer: AttentionLayer,
        call: AttentionCall,
        serve: Callable[[AttentionCall], torch.Tensor],
    ) -> torch.Tensor:
        """Serve a call, and check it where it is its turn."""
        out = serve(call)
        site = layer.site
        step = step_of_turn(site, self._calls_per_step)
        done = self._found.setdefault((site.component, site.name), {})
        if step is None or done.setdefault(step, None) is not None:
            return out
        if sees_own_keys(call) and call.gate is None and not projects(layer, call):
            with torch.no_grad():
                done[step] = row_errors(*sampled(layer, call, out, step))
        return out

    def as_dict(self, report: AttentionReport) -> dict[str, Json]:
        """Return what was found as JSON data; waits for the device.

        Args:
            report: what the layers ran.
        """
        layers: list[Json] = []
        for each in report.layers:
            calls = self._found.get((each.component, each.name), {})
            found = {step: errors for step, errors in calls.items() if errors is not None}
            if not found:
                continue
            errors = torch.stack(tuple(found.values())).double().cpu()  # [steps, 3, H]
            means = errors.mean((0, 2)).tolist()
            layers.append(
                {
                    "component": each.component,
                    "name": each.name,
                    "layer": each.layer,
                    "density": layer_density(each),
                    "steps": list(found),
                    "relative_l1": _finite(means[0]),
                    "relative_l2": _finite(means[1]),
                    "cosine": _finite(means[2]),
                    "relative_l2_of_worst_head": _finite(float(errors[:, 1].max())),
                }
            )
        told: dict[str, Json] = {"rows": ROWS, "calls_per_step": self._calls_per_step}
        unchecked = sum(x is None for calls in self._found.values() for x in calls.values())
        return told | {"layers": layers, "unchecked": unchecked}


def _rows_of_rank(
    inputs: RingInputs, lengths: Sequence[int], step: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return which sampled rows of a sequence are this rank's, where it has them, and all's number.

    Those that all ranks hold are the first one's.
    """
    call, me = inputs.call, inputs.call.group.index
    front, tokens = call.prefix, sum(lengths)
    rows = sample_rows(front + tokens + call.suffix, seed=step)
    start = front + sum(lengths[:me])
    shared = (rows < front) | (rows >= front + tokens)
    own = torch.where(shared, me == 0, (rows >= start) & (rows < start + lengths[me]))
    moved = torch.where(rows < front, 0, start - front)
    moved = torch.where(rows >= front + tokens, tokens - lengths[me], moved)
    found = own.nonzero().flatten(), (rows - moved)[own]
    places, here = (x.to(inputs.query.device, non_blocking=True) for x in found)
    return places, here, len(rows)


def _held(inputs: RingInputs, query: torch.Tensor) -> Iterator[AttentionCall]:
    """Yield calls over the keys that this rank answers for: its own, and the first one all's."""
    call, me = inputs.call, inputs.call.group.index
    held = [(inputs.key, inputs.value, call.mask_of(me))]
    if inputs.shared_key is not None and inputs.shared_value is not None and me == 0:
        held.append((inputs.shared_key, inputs.shared_value, call.shared_mask))
    for key, value, mask in held:
        if mask is not None:  # what masked keys hold, even NaN, has no influence
            mask, value = mask[:, None, None], zero_masked_rows(value, mask)
        if key.shape[1]:
            yield AttentionCall(query, key, value, mask)


def _exact_part(layer: AttentionLayer, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what all queries of a call make of its keys, to be merged with other keys.

    Returns:
        The largest score of every row, [B, H, R]; and the values and 1, weighed by the exponential
        of the scores below that and summed over the keys, [B, H, R, D + 1].
    """
    rows = torch.arange(call.query.shape[1], device=call.query.device)
    found = []
    for heads in head_slices(call, rows, (call.value,)):
        scores = _exact_scores(layer, call, rows, heads)
        top = scores.amax(-1)
        weights = _exp(scores, top)
        value = call.value[:, :, heads].to(scores.dtype).transpose(1, 2).unsqueeze(2)
        weighed = torch.cat((weights @ value, weights.sum(-1, keepdim=True)), dim=-1)
        found.append((top.flatten(1, 2), weighed.flatten(1, 2)))
    tops, parts = zip(*found, strict=True)
    return torch.cat(tops, dim=1), torch.cat(parts, dim=1)


def _exp(scores: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - top), [..., Sk] and [...]; 0 for rows without keys, whose top is -inf."""
    return (scores - top.masked_fill(top == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _finite(value: float) -> Json:
    """Return a number, or its name where JSON has none for it."""
    return value if abs(value) < float("inf") else str(value)


def _exact_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _ratio(error: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(error == 0, 0.0, error / whole)


def mask_of(layer: AttentionLayer, call: AttentionCall) -> KeyMask | torch.Tensor | None:
    """Return the mask of a call as one of the two kinds, or None."""
    if call.mask is None:
        return None
    self_attention = layer.site.role is not AttentionRole.CROSS
    return normalise_mask(call.mask, call.query, call.key, self_attention=self_attention)


def _masked(
    scores: torch.Tensor, mask: KeyMask | torch.Tensor, rows: torch.Tensor, heads: slice
) -> torch.Tensor:
    """Return scores, [B, h, H / Hkv, R, Sk], of some rows and key heads under a mask."""
    if isinstance(mask, KeyMask):
        return scores.masked_fill(~mask.tokens[:, None, None, None, :], -torch.inf)
    dense = mask if mask.shape[2] == 1 else mask[:, :, rows]
    by_head = dense.unsqueeze(2)
    if dense.shape[1] > 1:
        group = scores.shape[2]
        by_head = dense.reshape(len(dense), -1, group, *dense.shape[2:])[:, heads]
    if dense.dtype is torch.bool:
        return scores.masked_fill(~by_head, -torch.inf)
    return scores + by_head


def head_slices(
    call: AttentionCall, rows: torch.Tensor, values: Sequence[torch.Tensor]
) -> list[slice]:
    """Return the key heads in shares whose copies stay small."""
    batch, keys, kv_heads, size = call.key.shape
    group = call.query.shape[2] // kv_heads
    channels = size + max(value.shape[3] for value in values)
    per_head = 8 * batch * keys * (channels + 3 * group * len(rows))
    at_once = max(1, _BYTES_AT_ONCE // max(per_head, 1))
    return [slice(h, min(h + at_once, kv_heads)) for h in range(0, kv_heads, at_once)]
