"""Serves layers exactly that 8 bits, or a sparse method, turn out not to serve.

What ran is held against exact attention of a few rows, as `attention_check.py` does. Nothing waits
for the device inside of a layer: errors are read before the next call of a denoiser, where its
timestep is read too, so which layers are served exactly does not depend on timing.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.attention_report import GuardMiss, GuardReport
from multimodal_gen.runtime.generator.attention_check import row_errors, sampled, step_of_turn
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.managers.forward_context import current_forward_context

EVERY = 8
"""In so many steps, every layer is checked once."""

MISSED = "it missed the bound of the attention guard"
AGAIN = "the attention guard had a call that may not be finite computed again"

_BLOCK = 128  # queries, and keys, of the plan of a call that is computed again


class AttentionGuard:
    """Checks self-attention in every step, the layers in turn, and has those that miss run exactly.

    A layer that missed stays exact, in later generations too. Calls that need gradients, that have
    a cache, a mask of blocks or sink logits are not checked; of those whose output is more than
    attention, by a gate or a trained projection, only whether they are finite.

    Args:
        bounds: the errors that layers may have.
    """

    def __init__(self, bounds: GuardBounds) -> None:
        self._bounds = bounds
        # Misses as they are of outputs that are not finite, and on the device: the error, whether
        # the output is finite, and whether the truth is.
        self._pending: list[tuple[GuardMiss, torch.Tensor]] = []
        self._missed: dict[tuple[str | None, str], GuardMiss] = {}
        self._calls = 0
        # By layer: the step that was checked last, and shapes of its calls that were.
        self._checked: dict[tuple[str | None, str], tuple[object, set[tuple[int, int]]]] = {}

    def __call__(
        self,
        layer: AttentionLayer,
        serve: Callable[[AttentionCall], torch.Tensor],
        call: AttentionCall,
    ) -> torch.Tensor:
        """Serve a call of a layer, exactly where it missed before, and check it on its turn.

        Raises:
            UsageError: a CUDA graph is being captured, which would replay one decision for ever.
        """
        _refuse_capture(call.query)
        site = layer.site
        if (site.component, site.name) in self._missed:
            return serve(call._replace(exact=MISSED))
        step = None if call.wants_gradient() or call.is_extended() else self._step(site, call)
        if step is None:
            return serve(call)
        with torch.no_grad():
            seen = call.autocast() if call.autocasts() else call
            bound = layer.entry_for(seen.query).primary
            if not bound.rounds and (not bound.is_sparse or call.no_grid):
                return serve(call)
            return self._checked_call(layer, serve, call, seen, bound, step)

    def _step(self, site: LayerSite, call: AttentionCall) -> int | None:
        """Return the running step if a call is to be checked at it, or None."""
        step = step_of_turn(site, -(-(site.num_layers or 1) // EVERY))
        context = current_forward_context()
        if step is None or context is None:
            return None
        now = (context.request_id, step)
        key, shape = (site.component, site.name), (call.query.shape[1], call.key.shape[1])
        last, shapes = self._checked.get(key, (None, set()))
        if last != now:
            shapes = set()
            self._checked[key] = (now, shapes)
        if shape in shapes or not min(shape):
            return None
        shapes.add(shape)
        return step

    def _checked_call(
        self,
        layer: AttentionLayer,
        serve: Callable[[AttentionCall], torch.Tensor],
        call: AttentionCall,
        seen: AttentionCall,
        bound: Binding,
        step: int,
    ) -> torch.Tensor:
        """Serve a call and keep its error; where it is not finite, return it computed again."""
        out = serve(call)
        finite = out.isfinite().all()
        projects = call.projection is not None and "projection" in bound.impl.takes
        if call.gate is not None or projects:
            error, sane = finite.new_zeros((), dtype=torch.float32), finite.new_ones(())
        else:
            rows, truth = sampled(layer, seen, out, step)
            error, sane = row_errors(rows, truth)[1].max().float(), truth.isfinite().all()
        self._calls += 1
        site = layer.site
        miss = GuardMiss(
            component=site.component,
            name=site.name,
            role=site.role,
            layer=site.layer,
            step=step,
            error=None,
            bound=self._bounds.sparse if bound.is_sparse else self._bounds.quantized,
            dense=bound.is_sparse,
        )
        self._pending.append((miss, torch.stack((error, finite.float(), sane.float()))))
        return _finite_or_again(layer, serve, call, seen, out, finite)

    def settle(self) -> None:
        """Read the errors that were found, and decide which layers run exactly from now on.

        Raises:
            UsageError: a CUDA graph is being captured.
        """
        pending, self._pending = self._pending, []
        for miss, found in pending:
            _refuse_capture(found)
            error, finite, sane = found.tolist()
            within = miss.bound is None or error <= miss.bound
            key = (miss.component, miss.name)
            # Where exact attention is not finite either, it would not help.
            if not sane or (finite and within) or key in self._missed:
                continue
            self._missed[key] = replace(miss, error=error if finite else None)

    def report(self) -> GuardReport:
        """Return what was found so far; waits for the device."""
        self.settle()
        return GuardReport(
            quantized=self._bounds.quantized,
            sparse=self._bounds.sparse,
            calls=self._calls,
            missed=tuple(self._missed.values()),
        )


def _finite_or_again(
    layer: AttentionLayer,
    serve: Callable[[AttentionCall], torch.Tensor],
    call: AttentionCall,
    seen: AttentionCall,
    out: torch.Tensor,
    finite: torch.Tensor,
) -> torch.Tensor:
    """Return the output of a call, or what dense attention gives where it is not finite.

    A GPU is not waited for: there a plain call is computed again over no block at all where `out`
    is finite, which takes next to nothing, and other calls are computed again in any case.

    Args:
        layer: whose call it is.
        serve: serves it.
        call: the call.
        seen: the call in the dtype that kernels get.
        out: its output, [B, Sq, H, Dv].
        finite: bool, 0-d, whether that is finite.
    """
    if out.device.type == "cpu":
        return out if finite else serve(call._replace(exact=AGAIN))
    if out.device.type != "cuda" or not _is_plain(layer, seen):
        return torch.where(finite, out, serve(call._replace(exact=AGAIN)))
    scale = layer.geometry.softmax_scale
    return torch.where(finite, out, dense_unless(finite, *seen[:3], scale=scale))


def _is_plain(layer: AttentionLayer, call: AttentionCall) -> bool:
    """Whether kernels over blocks serve a call as it is."""
    if layer.geometry.causal or call.mask is not None or any(call.replicated):
        return False
    if call.gate is not None or call.projection is not None:
        return False
    return call.query.shape[3] == call.value.shape[3] <= 128


def dense_unless(
    done: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Return dense attention, or zeros in next to no time where it is not needed.

    Which of them it is the device decides: nothing waits for it.

    Args:
        done: bool, 0-d, on the device of the others: whether zeros will do.
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        scale: factor of the scores.

    Returns:
        [B, Sq, H, D] in the dtype of `query`.
    """
    rows, keys = (Blocks.regular(x.shape[1], _BLOCK) for x in (query, key))
    every = torch.arange(keys.num, dtype=torch.int32, device=query.device)
    plan = BlockPlan(
        indices=every.expand(1, 1, rows.num, keys.num),
        counts=(~done).to(torch.int32).mul(keys.num).expand(1, 1, rows.num),
        q=rows,
        kv=keys,
        uniform=True,
    )
    with torch.autocast(query.device.type, enabled=False):
        out = block_sparse_attention(query, key, value, plan, scale=scale)
    assert isinstance(out, torch.Tensor), "no lse was asked for"
    return out


def _refuse_capture(x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "attention_guard (--attention-guard) must be left out while a CUDA graph is captured, "
            "which would replay what the guard decided in one step for ever; leave it out, or run "
            "without the graph"
        )
