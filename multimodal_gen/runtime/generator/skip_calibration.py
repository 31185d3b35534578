"""Finds the curve of skip-softmax for a model: what share of steps each lambda would leave out.

Prompts are generated with dense attention, and at every call of a self-attention layer some heads
and some blocks of queries are looked at by definition: a block of keys would be left out where all
of its weights are at most lambda of the largest that its rows have seen so far. ModelOpt's curve,

    threshold_scale_factor = a * exp(b * share),  with lambda = threshold_scale_factor / keys,

is fitted to the means over layers and steps of every prompt, as a line through the logarithms.

Shapes: S tokens, H heads, D head size, L lambdas that are tried.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError, short
from multimodal_gen.runtime.generator.library_errors import out_of_memory_explained
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.generator.run import Attach, Handle, observe
from multimodal_gen.runtime.layers.attention.call import AttentionCall, watching
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.sparse.methods.skip_softmax import BLOCK
from multimodal_gen.runtime.layers.attention.sparse.skip_curve import SkipCurve
from multimodal_gen.runtime.layers.attention.sparse.tiles import layout_of
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.server_args import ServerArgs

_HEADS, _ROWS = 4, 8  # heads of a layer, and blocks of queries of a head, that are looked at
_LAMBDAS = (0.95, 0.9, 0.8, 0.7, *(10 ** (-i / 4) for i in range(1, 25)))
_FITTED = (0.1, 0.9)  # shares that the curve goes by; what lies outside bends away
_LARGEST_LOG = math.log(sys.float_info.max) - 1  # of a coefficient: shares that hardly rise


def skipped_shares(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    *,
    scale: float,
    lambdas: Sequence[float],
    heads: Sequence[int],
    rows: Sequence[slice],
) -> torch.Tensor:
    """Return the share of the blocks of keys that each lambda leaves out, fp64 [L] on the CPU.

    Args:
        query: [Sq, H, D].
        keys: parts of the keys, [n, Hkv, D], in the order they are attended to; each is cut into
            blocks of `BLOCK`.
        scale: factor of the scores.
        lambdas: L shares in (0, 1).
        heads: query heads to look at.
        rows: blocks of queries to look at.
    """
    limits = torch.tensor([math.log(each) for each in lambdas], device=query.device)
    left, total = torch.zeros(len(lambdas), dtype=torch.float64), 0
    group = query.shape[1] // keys[0].shape[1]
    for head in heads:
        parts = [part[:, head // group].float() for part in keys]
        for block in rows:
            best = torch.cat([_best(query[block, head].float(), x, scale) for x in parts], dim=1)
            near = (best[:, 1:] - best.cummax(1).values[:, :-1]).amax(0)
            left += (near[:, None] <= limits).sum(0).double().cpu()
            total += best.shape[1]
    return left / total


def _best(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the largest score of every row in every block of keys, [R, N]."""
    scores = query @ key.T * scale
    scores = F.pad(scores, (0, -key.shape[0] % BLOCK), value=-math.inf)
    return scores.view(len(scores), -1, BLOCK).amax(2)


@dataclass(slots=True)
class SkipRecorder:
    """Looks at the self-attention of one component through a generation.

    Attributes:
        component: its name.
        shares: by (step, layer), the shares of the samples of its calls, fp64 [L].
        keys: of a call; 0 before one was seen.
    """

    component: str
    shares: dict[tuple[int, str], list[torch.Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )
    keys: int = 0

    def __call__(
        self, layer: Any, call: AttentionCall, serve: Callable[[AttentionCall], torch.Tensor]
    ) -> torch.Tensor:
        """Serve a call, and look at it."""
        site, context = layer.site, current_forward_context()
        wanted = site.role is AttentionRole.SELF and site.component == self.component
        plain = call.mask is None and not call.is_extended() and call.query.shape[0] > 0
        if wanted and plain and context is not None and context.latent_grid is not None:
            self.keys = call.key.shape[1]
            layout = layout_of(call.query.shape[1], self.keys, context, "calibration")
            video = layout.video
            heads, blocks = call.query.shape[2], -(-layout.num_video // BLOCK)
            starts = [BLOCK * i for i in _spread(blocks, _ROWS)]
            # Branches of guidance may be in one call.
            for query, key in zip(call.query, call.key, strict=True):
                text = torch.cat((key[: video.start], key[video.stop :]))
                with torch.no_grad():
                    found = skipped_shares(
                        query[video],
                        [key[video], text] if len(text) else [key[video]],
                        scale=layer.geometry.softmax_scale,
                        lambdas=_LAMBDAS,
                        heads=_spread(heads, _HEADS),
                        rows=[slice(i, i + BLOCK) for i in starts],
                    )
                self.shares[context.current_timestep, site.name].append(found)
        return serve(call)

    def mean(self, *, step: int | None = None, layer: str | None = None) -> torch.Tensor:
        """Return the mean of the shares, of one step or one layer or of all, fp64 [L]."""
        held = [
            share
            for (at, name), shares in self.shares.items()
            if step in (None, at) and layer in (None, name)
            for share in shares
        ]
        return torch.stack(held).mean(0)


def _spread(count: int, most: int) -> list[int]:
    """Return at most so many of the numbers below `count`, as far apart as they go."""
    return [i * count // min(count, most) for i in range(min(count, most))]


def fit_curve(points: Sequence[tuple[float, float]], keys: int) -> tuple[float, float]:
    """Return a and b of the curve through (threshold_scale_factor, share), by least squares.

    As ModelOpt's `fit_logspace`: log(factor) = log(a) + b * share, over shares of 0.1 to 0.9.

    Args:
        points: what was seen.
        keys: of a call.

    Raises:
        UsageError: too few shares lie there, or they do not rise.
    """
    low, high = _FITTED
    held = [(math.log(factor), share) for factor, share in points if low <= share <= high]
    shares = [share for _, share in held]
    every = [share for _, share in points]
    if len(set(shares)) > 1:
        line = linear_regression(shares, [log for log, _ in held])
        if line.slope > 0 and abs(line.intercept) < _LARGEST_LOG:
            return math.exp(line.intercept), line.slope
    remedy = f"calibrate on larger or longer videos, of blocks of {BLOCK} tokens, or more prompts"
    if max(every) < low and keys > 2 * BLOCK:
        remedy = (
            f"attention is flat over these {keys} keys, as that of random weights is, and "
            f"skip_softmax would leave next to nothing out: take another method"
        )
    raise UsageError(
        f"a curve must be fitted to two shares from {low} to {high} at least, which rise, got "
        f"{min(every):.2f} to {max(every):.2f} for lambda from {min(_LAMBDAS):g} to "
        f"{max(_LAMBDAS):g}; {remedy}"
    )


def share_at(shares: torch.Tensor, threshold: float) -> float:
    """Return the share that a lambda leaves out, between those that were tried, fp64 [L]."""
    import numpy as np

    tried = sorted(
        (math.log(each), share) for each, share in zip(_LAMBDAS, shares.tolist(), strict=True)
    )
    return float(np.interp(math.log(threshold), *zip(*tried, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What a calibration found.

    Attributes:
        component: which denoiser it is of.
        is_only: whether the pipeline has no other.
        curve: the curve.
        keys: of a call.
        recorders: what was seen of every prompt.
    """

    component: str
    is_only: bool
    curve: SkipCurve
    keys: int
    recorders: tuple[SkipRecorder, ...]

    def share(self, target: float, **of: Any) -> float:
        """Return the share that the curve's lambda leaves out, of a step or a layer if named."""
        threshold = self.curve.factor(target) / self.keys
        shares = torch.stack([recorder.mean(**of) for recorder in self.recorders]).mean(0)
        return share_at(shares, threshold)

    def most(self) -> float:
        """Return the largest share that the curve has for a lambda that was tried."""
        factor = max(_LAMBDAS) * self.keys
        return math.floor(100 * math.log(factor / self.curve.a) / self.curve.b) / 100

    def reached(self, targets: Sequence[float]) -> list[float]:
        """Return the shares that a lambda below 1 leaves out by the curve."""
        return [each for each in targets if self.curve.factor(each) < self.keys]

    def as_config(self, targets: Sequence[float]) -> dict[str, Any]:
        """Return parameters of `skip_softmax`, with what was seen at the targets beside the curve.

        Args:
            targets: shares of steps to leave out, which are `reached`; the first one is asked for.
        """
        seen = self.recorders[0].shares
        steps = sorted({step for step, _ in seen})
        layers = list(dict.fromkeys(layer for _, layer in seen))
        measured = [
            {
                "target_sparsity": target,
                "threshold_scale_factor": self.curve.factor(target),
                "share": round(self.share(target), 4),
                "by_step": {step: round(self.share(target, step=step), 4) for step in steps},
                "by_layer": {each: round(self.share(target, layer=each), 4) for each in layers},
            }
            for target in targets
        ]
        more = {"component": self.component, "keys": self.keys, "measured": measured}
        return {
            "target_sparsity": targets[0],
            "sparse_attention_config": {
                **self.curve.as_mapping(),
                "producer": {"name": "multimodal_gen", **more},
            },
        }


def calibrate(
    args: ServerArgs,
    prompts: Sequence[str],
    attach: Attach,
    *,
    component: str | None = None,
    told: Callable[[int, float], None] = lambda number, seconds: None,
) -> Calibrated:
    """Generate prompts with dense attention, and fit the curve to what is seen of them.

    Args:
        args: what to load and how to run it; its `prompt` is not used.
        prompts: what to generate.
        attach: attaches dense attention to the loaded pipeline.
        component: which denoiser it is about; None where there is one.
        told: gets the number of a prompt, from 1, and the seconds it took.

    Raises:
        UsageError: an option does not fit the pipeline or the device, `component` is none of its
            denoisers, no self-attention was seen, or no curve can be fitted.
    """
    recorders: list[SkipRecorder] = []
    names: list[str] = []

    def attach_to(pipe: Any) -> Handle:
        names.extend(denoisers(pipe))
        if component not in names and (component is not None or len(names) != 1):
            raise UsageError(
                f"--component must name one of the denoisers of {type(pipe).__name__} "
                f"({', '.join(names)}), got {short(component) if component else 'none'}"
            )
        return attach(pipe)

    runs = observe(args, prompts, attach_to, lambda: SkipRecorder(component or names[0]), watching)
    with out_of_memory_explained(), closing(runs):
        for number, (recorder, seconds, _) in enumerate(runs, 1):
            recorders.append(recorder)
            told(number, seconds)
    chosen, keys = recorders[0].component, max(recorder.keys for recorder in recorders)
    if not keys:
        raise UsageError(
            f"a calibration must see self-attention of {chosen}, got none: its calls have "
            f"masks, which are not looked at, or none of the steps was its own"
        )
    points = [
        (threshold * keys, share)
        for recorder in recorders
        for threshold, share in zip(_LAMBDAS, recorder.mean().tolist(), strict=True)
    ]
    a, b = fit_curve(points, keys)
    curve = SkipCurve(a=a, b=b)
    return Calibrated(
        component=chosen,
        is_only=len(names) == 1,
        curve=curve,
        keys=keys,
        recorders=tuple(recorders),
    )
