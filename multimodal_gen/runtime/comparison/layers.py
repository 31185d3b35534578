"""What backends do to single attention calls: the reference's, replayed while it runs.

Of a few denoising steps, each self-attention call that the reference serves is given to the other
backends too, whole, with the reference's q, k and v, and their outputs are dropped again: what is
kept is how far a few rows are from exact attention of these rows (`generator/attention_check.py`).
So nothing of a run is stored, and no error of an earlier layer or step is counted twice.

How much of the attention's weight a sparse method keeps is read from its plan where it tells that
(`sparse/kept_pairs.py`): the sum of the exact weights of the sampled rows over the keys they keep.
The authors' own packages do not tell. Then it is estimated from what ran: the call is made once
more with values r_j that are random signs. Row i of exact attention is then sum_j p_ij r_j. Where
the method keeps the keys K of the row, and its scores are exact, its output is
sum_K p_ij r_j / m_i, with m_i = sum_K p_ij the weight that is kept. Signs of different keys are
uncorrelated, so

    E[output . exact] / E[output . output] = (sum_K p_ij^2 / m_i) / (sum_K p_ij^2 / m_i^2) = m_i

over D channels at a time; the mean over rows is what is reported. With 64 rows of 128 channels it
is within 0.01 or so. What a method adds to what it keeps, such as a linear branch, changes it.

Where a head looks is found in the same way, with values that tell in which cell of the video grid
a key lies: channel c of a row is the weight of cell c.

A call is replayed on a layer that is made for it, so that nothing is carried on: methods that keep
something from step to step start anew. Where a checkpoint has gates of a coarse branch, methods
that have one get the gate of the reference's own input.

Shapes: B batch, S tokens, R sampled rows, H query heads, Hkv key heads, D head size.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from multimodal_gen.errors import UsageError, first_line, is_out_of_memory
from multimodal_gen.runtime.comparison.paired import mean_and_deviation
from multimodal_gen.runtime.comparison.record import (
    LayerErrors,
    LayerSpread,
    MaskPicture,
    grouped,
)
from multimodal_gen.runtime.generator.attention_check import (
    exact_rows,
    exact_weights,
    head_slices,
    projects,
    row_errors,
    sample_rows,
    sees_own_keys,
)
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import AttentionCall, watching
from multimodal_gen.runtime.layers.attention.report import ReportEntry
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import KeptPairs, recorded_pairs
from multimodal_gen.runtime.layers.attention.sparse.tiles import layout_of
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    current_forward_context,
    use_forward_context,
)

_Serve: TypeAlias = Callable[[AttentionCall], torch.Tensor]

_Source: TypeAlias = Literal["dense", "plan", "estimate"]
"""Where a mass is from; see `LayerErrors`."""

_CELLS = 512  # of a picture, at most
_DIGITS = 5


@dataclass(slots=True, kw_only=True)
class Measured:
    """What replaying found of one backend.

    Attributes:
        layers: errors of the calls.
        masks: where chosen heads look.
        projected: calls without errors, as a trained projection adds to attention there.
        failure: why the backend could not serve a call, or "".
    """

    layers: tuple[LayerErrors, ...] = ()
    masks: tuple[MaskPicture, ...] = ()
    projected: int = 0
    failure: str = ""


class Replay:
    """Replays calls of one generation of the reference on other backends, as a `Watch`.

    A backend that fails is left out from then on; the generation goes on.

    Args:
        reference: name of the reference, whose own outputs are measured too.
        scopes: what the other runs ask for, by name.
        num_steps: how many denoising steps are replayed, spread evenly over the generation; None
            for one in ten, up to three.
        excluded: encloses all that is no part of the generation.
        pictures: whether to draw where chosen heads look.

    Attributes:
        found: what was found, by name; complete when the generation is.
    """

    def __init__(
        self,
        reference: str,
        scopes: Mapping[str, SelectionScope],
        num_steps: int | None,
        excluded: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        pictures: bool = True,
    ) -> None:
        self.found = {name: Measured() for name in (reference, *scopes)}
        self._reference = reference
        self._scopes = dict(scopes)
        self._num_steps = num_steps
        self._excluded = excluded
        self._pictures = pictures
        self._pictured: set[tuple[str, str | None, int | None]] = set()

    def __call__(self, layer: AttentionLayer, call: AttentionCall, serve: _Serve) -> torch.Tensor:
        """Serve a call, and replay it where its step is one to be replayed."""
        out = serve(call)
        context = current_forward_context()
        if context is None or not _is_measured(layer) or not sees_own_keys(call):
            return out
        steps = sampled_steps(context.num_steps, self._num_steps)
        if context.current_timestep in steps:
            with self._excluded(), torch.no_grad(), watching(None):
                seen = call.autocast()
                picture = self._pictures and context.current_timestep == max(steps)
                self._measure(layer, seen, out, context, picture=picture)
        return out

    def _measure(
        self,
        layer: AttentionLayer,
        call: AttentionCall,
        out: torch.Tensor,
        context: ForwardContext,
        *,
        picture: bool,
    ) -> None:
        """Measure what the reference made of a call, and what the others make of it."""
        seed = 1_000 * context.current_timestep + (layer.site.layer or 0)
        rows = sample_rows(call.query.shape[1], seed, device=call.query.device)
        (truth,) = exact_rows(layer, call, rows, (call.value,))
        errors = row_errors(out[:, rows], truth)
        ran = _served(layer).selection.label
        self._add(self._reference, layer, context, ran, errors, *_dense(errors))
        gated = _with_gate(call)
        for name, scope in self._scopes.items():
            measured = self.found[name]
            if measured.failure:
                continue
            try:
                other = layer.like(scope)
                asked = gated if other.takes_gate else call
                with recorded_pairs() as told:
                    found = other.attend(asked)[:, rows]
                served = _served(other)
                density = dict(served.densities).get(context.current_timestep, 1.0)
                if density < 1 and picture:
                    self._picture(name, other, call, context)
                if projects(other, call):
                    measured.projected += 1  # it differs by what it was trained for
                    continue
                errors = row_errors(found, truth)
                mass = _dense(errors)
                if density < 1:
                    mass = _kept_by(layer, other, call, rows, told, seed)
                ran = served.selection.label
                self._add(name, layer, context, ran, errors, *mass, density)
            except Exception as error:
                measured.failure = failure_line(error)

    def _add(
        self,
        name: str,
        layer: AttentionLayer,
        context: ForwardContext,
        ran: str,
        errors: torch.Tensor,
        kept: torch.Tensor,
        source: _Source,
        density: float = 1.0,
    ) -> None:
        l1, l2, cosine = errors.tolist()
        self.found[name].layers += (
            LayerErrors(
                component=layer.site.component or "",
                name=layer.site.name,
                layer=layer.site.layer or 0,
                step=context.current_timestep,
                branch=context.cfg_branch,
                backend=ran,
                relative_l1=_rounded(l1),
                relative_l2=_rounded(l2),
                cosine=_rounded(cosine, 9),
                kept_mass=_rounded(kept.tolist()),
                kept_mass_source=source,
                density=density,
            ),
        )

    def _picture(
        self,
        name: str,
        layer: AttentionLayer,
        call: AttentionCall,
        context: ForwardContext,
    ) -> None:
        """Draw chosen heads of chosen layers, once each."""
        site = layer.site
        count = site.num_layers or 1
        key = (name, site.component, site.layer)
        if context.latent_grid is None or key in self._pictured:
            return
        if site.layer not in (count // 2, count - 1):
            return
        self._pictured.add(key)
        heads = layer.geometry.num_heads
        chosen = sorted({0, heads // 2, heads - 1})
        self.found[name].masks += tuple(_pictures(layer, call, context, chosen))


def averaged(clips: Sequence[Sequence[LayerErrors]]) -> tuple[LayerErrors, ...]:
    """Return the means of what was found over prompts and seeds, with their spread."""
    by_place = grouped(
        ((each.component, each.name, each.step, each.branch), each)
        for clip in clips
        for each in clip
    )
    return tuple(map(_mean_of, by_place.values()))


def _mean_of(found: Sequence[LayerErrors]) -> LayerErrors:
    """Return the mean of the same layer at the same step, with its spread."""
    if len(found) == 1:
        return found[0]
    sources = {each.kept_mass_source for each in found}
    least_exact: tuple[_Source, ...] = ("estimate", "plan", "dense")
    return replace(
        found[0],
        **_by_head(found, statistics.fmean),
        kept_mass_source=next((source for source in least_exact if source in sources), None),
        density=statistics.fmean(each.density for each in found),
        clips=len(found),
        spread=LayerSpread(**_by_head(found, lambda figures: mean_and_deviation(figures)[1])),
    )


def _by_head(
    found: Sequence[LayerErrors], statistic: Callable[[Sequence[float]], float]
) -> dict[str, Any]:
    """Return the statistic of the same head's figures, for each list of a layer."""
    masses = [each.kept_mass for each in found if each.kept_mass is not None]
    lists = {
        "relative_l1": [each.relative_l1 for each in found],
        "relative_l2": [each.relative_l2 for each in found],
        "cosine": [each.cosine for each in found],
        **({"kept_mass": masses} if masses else {}),
    }
    return {
        name: _rounded(map(statistic, zip(*rows, strict=True)), 9 if name == "cosine" else _DIGITS)
        for name, rows in lists.items()
    }


class WarmUp:
    """Gives a few calls of a short generation to all backends, so that their kernels are compiled.

    Each of them serves these calls as if they were of the first and of the last step of a whole
    generation: many methods are dense at first.

    Args:
        scopes: what the runs ask for, by name.
        num_steps: denoising steps of a whole generation.
        wait: waits for the device.

    Attributes:
        seconds: what that took, by name.
    """

    def __init__(
        self, scopes: Mapping[str, SelectionScope], num_steps: int, wait: Callable[[], object]
    ) -> None:
        self.seconds = dict.fromkeys(scopes, 0.0)
        self._scopes = dict(scopes)
        self._num_steps = num_steps
        self._wait = wait
        self._failed: set[str] = set()
        self._done: set[tuple[int, int]] = set()

    def __call__(self, layer: AttentionLayer, call: AttentionCall, serve: _Serve) -> torch.Tensor:
        """Serve a call, and let the others serve it where the layer is one of those chosen."""
        out = serve(call)
        context, site = current_forward_context(), layer.site
        count = site.num_layers or 1
        chosen = site.layer in (0, 1, 2, count // 2, count - 1)
        key = (id(layer), call.query.shape[0])
        if context is None or not _is_measured(layer) or not chosen or key in self._done:
            return out
        self._done.add(key)
        with torch.no_grad(), watching(None):
            for name in self._scopes:
                if name not in self._failed:
                    self._warm(name, layer, call, context)
        return out

    def _warm(
        self, name: str, layer: AttentionLayer, call: AttentionCall, context: ForwardContext
    ) -> None:
        self._wait()
        start = time.perf_counter()
        try:
            other = layer.like(self._scopes[name])
            for step in {0, self._num_steps - 1}:
                at_step = replace(
                    context, current_timestep=step, num_steps=self._num_steps, request_id=None
                )
                with use_forward_context(at_step):
                    other.attend(_with_gate(call) if other.takes_gate else call)
        except Exception:  # its own run will say so
            self._failed.add(name)
        self._wait()
        self.seconds[name] += time.perf_counter() - start


def _with_gate(call: AttentionCall) -> AttentionCall:
    """Return a call as layers with a coarse branch get it."""
    return call if call.spare_gate is None else call._replace(gate=call.spare_gate())


def _dense(errors: torch.Tensor) -> tuple[torch.Tensor, _Source]:
    """Return what dense attention keeps, for the heads of its `errors`, [3, H]: all."""
    return torch.ones_like(errors[0]), "dense"


def _kept_by(
    layer: AttentionLayer,
    other: AttentionLayer,
    call: AttentionCall,
    rows: torch.Tensor,
    told: Sequence[KeptPairs],
    seed: int,
) -> tuple[torch.Tensor, _Source]:
    """Return the share of exact weight that sampled rows of a sparse call keep, [H].

    It is exact if the method told its plan.
    """
    covered = {head for each in told for head in range(each.heads.start, each.heads.stop)}
    if covered == {*range(call.query.shape[2])}:
        return mass_of_plan(layer, call, rows, told), "plan"
    signs = _random_signs(call, seed)
    (exact,) = exact_rows(layer, call, rows, (signs,))
    seen = other.attend(call._replace(value=signs))[:, rows]
    return kept_mass(seen, exact), "estimate"


def mass_of_plan(
    layer: AttentionLayer, call: AttentionCall, rows: torch.Tensor, told: Sequence[KeptPairs]
) -> torch.Tensor:
    """Return the share of exact attention's weight that rows keep by what a method told.

    Args:
        layer: whose call it is.
        call: the call.
        rows: int64 [R], which queries.
        told: what all query heads of the call keep.

    Returns:
        [H] in fp64, mean over rows and batch.
    """
    found = torch.zeros(call.query.shape[2], dtype=torch.float64, device=call.query.device)
    group = call.query.shape[2] // call.key.shape[2]
    for part in head_slices(call, rows, (call.value,)):
        weights = exact_weights(layer, call, rows, part).flatten(1, 2)  # [B, h, R, Sk]
        first, stop = part.start * group, part.stop * group
        for each in told:
            start, end = max(first, each.heads.start), min(stop, each.heads.stop)
            if start < end:
                kept = each.of_rows(rows, slice(start - each.heads.start, end - each.heads.start))
                share = (weights[:, start - first : end - first] * kept).sum(-1)
                found[start:end] = share.mean((0, 2)).to(found.dtype)
    return found


def sampled_steps(num_steps: int | None, count: int | None) -> tuple[int, ...]:
    """Return at most `count` of `num_steps` denoising steps: the first, the last, and between.

    Args:
        num_steps: denoising steps; None where unknown, for the first ones.
        count: how many to take; None for one in ten, up to three.
    """
    if count is None:
        count = min(max((num_steps or 0) // 10, 1), 3)
    if num_steps is None:
        return tuple(range(count))
    if count >= num_steps:
        return tuple(range(num_steps))
    if count == 1:
        return (num_steps // 2,)
    last = num_steps - 1
    return tuple(sorted({round(i * last / (count - 1)) for i in range(count)}))


def kept_mass(seen: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Estimate the share of attention's weight that rows keep, from values that are random signs.

    Args:
        seen: the method's output of sampled rows, [B, R, H, D].
        exact: exact attention of these rows.

    Returns:
        [H], mean over rows, at most 1. A row whose output is zero keeps nothing.
    """
    seen = seen.to(exact.dtype)
    own = seen.square().sum(-1)
    share = torch.where(own == 0, 0.0, (seen * exact).sum(-1) / own)
    return share.mean((0, 1)).clamp_max(1.0)


def grid_cells(
    grid: tuple[int, int, int], most: int = _CELLS
) -> tuple[tuple[int, int, int], torch.Tensor]:
    """Cut a grid into at most so many cells.

    Args:
        grid: (T, H, W) in tokens.
        most: cells at most.

    Returns:
        Tokens of a cell along each axis, and int64 [T, H, W], the cell of each token, counted along
        width first, then height.
    """
    cell = [1, 1, 1]

    def counts() -> list[int]:
        return [-(-size // step) for size, step in zip(grid, cell, strict=True)]

    while counts()[0] * counts()[1] * counts()[2] > most:
        widest = max(range(3), key=lambda axis: counts()[axis])
        cell[widest] *= 2
    of_axis = [torch.arange(size) // step for size, step in zip(grid, cell, strict=True)]
    _, rows, columns = counts()
    cells = (of_axis[0][:, None, None] * rows + of_axis[1][:, None]) * columns + of_axis[2]
    return (cell[0], cell[1], cell[2]), cells


def _pictures(
    layer: AttentionLayer, call: AttentionCall, context: ForwardContext, heads: list[int]
) -> Iterator[MaskPicture]:
    """Yield where heads look from the middle of the video, in the last sample of the batch."""
    grid = context.latent_grid
    assert grid is not None, "callers know"
    layout = layout_of(call.query.shape[1], call.key.shape[1], context, "a picture")
    cell, of_token = grid_cells(grid)
    num = int(of_token.max()) + 1
    middle = (grid[0] // 2, grid[1] // 2, grid[2] // 2)
    place = (middle[0] * grid[1] + middle[1]) * grid[2] + middle[2]
    row = torch.tensor([layout.start + place], device=call.query.device)
    video = torch.arange(layout.video.start, layout.video.stop)
    size = call.value.shape[3]
    kept, exact = [], []
    for first in range(0, num, size):
        inside = (of_token.flatten() >= first) & (of_token.flatten() < first + size)
        values = torch.zeros_like(call.value)
        values[:, video[inside].to(values.device), :, of_token.flatten()[inside] - first] = 1.0
        told = call._replace(value=values)
        kept.append(layer.attend(told)[-1, row[0]])
        exact.append(exact_rows(layer, told, row, (values,))[0][-1, 0])
    shape = [-(-axis // step) for axis, step in zip(grid, cell, strict=True)]
    for head in heads:
        found = [
            torch.cat(parts, dim=1)[head, :num].double().reshape(shape).tolist()
            for parts in (kept, exact)
        ]
        yield MaskPicture(
            component=layer.site.component or "",
            layer=layer.site.layer or 0,
            head=head,
            step=context.current_timestep,
            grid=grid,
            cell=cell,
            query=middle,
            kept=_rounded_cells(found[0]),
            exact=_rounded_cells(found[1]),
        )


def failure_line(error: BaseException) -> str:
    """Return why a backend failed, in a line."""
    line = first_line(error)
    if is_out_of_memory(error):
        return f"out of memory: {line}"
    return line if isinstance(error, UsageError) else f"{type(error).__name__}: {line}"


def _is_measured(layer: AttentionLayer) -> bool:
    return layer.site.role is AttentionRole.SELF and layer.site.layer is not None


def _random_signs(call: AttentionCall, seed: int) -> torch.Tensor:
    """Return signs in the shape of a call's values."""
    signs = torch.empty_like(call.value)
    for head in range(signs.shape[2]):
        generator = torch.Generator(signs.device).manual_seed(1_000 * head + seed)
        signs[:, :, head].bernoulli_(0.5, generator=generator)
    return signs.mul_(2).sub_(1)


def _served(layer: AttentionLayer) -> ReportEntry:
    """Return what served the calls of a layer, the first of its backends where there are several.

    A layer that is made for one call has one.
    """
    report = layer.report()
    return next(entry for entry in (*report.entries, *report.detours) if entry.calls)


def _rounded(values: Iterable[float], digits: int = _DIGITS) -> tuple[float, ...]:
    return tuple(float(f"{value:.{digits}g}") for value in values)


def _rounded_cells(
    cells: list[list[list[float]]],
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    return tuple(tuple(_rounded(row, 3) for row in plane) for plane in cells)
