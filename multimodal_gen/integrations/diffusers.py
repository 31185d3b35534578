"""`apply`: does the attention of a stock diffusers pipeline or model with this package's layers.

Each attention module keeps its processor's code; only the attention call in it is replaced
(`processor_patch.py`). Nothing outside the target changes: not diffusers' global backend, no other
pipeline. `AttentionHandle.remove` puts the very same objects back.

A copy of an attached model, by `copy.deepcopy` or pickle, is a stock one; of this package it keeps
hooks that do nothing, so unpickling it takes an installed `multimodal_gen`. Calling diffusers' own
`set_attention_backend` on an attached model hands its attention to diffusers until `remove`.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from multimodal_gen.errors import NothingAppliedError, UnsupportedBackendError, UsageError
from multimodal_gen.integrations.ahead import Ahead, generation_of
from multimodal_gen.integrations.components import Component, Kind, find_components, unwrap
from multimodal_gen.integrations.cuda_graphs import CudaGraphs
from multimodal_gen.integrations.denoiser_plan import DenoiserPlan
from multimodal_gen.integrations.forward_hooks import notice_end
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.integrations.module_attention import ModuleAttention
from multimodal_gen.integrations.parallel.plan import require_split
from multimodal_gen.integrations.scopes import check_overrides
from multimodal_gen.integrations.steps import StepTracker
from multimodal_gen.integrations.transformers import EncoderPlan
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.described_tokens import DescribedTokens, describe_tokens
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.timing import sum_of
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.guard_bounds import parse_guard_bounds
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, scope_from
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import expect

_HANDLE = "_multimodal_gen_handle"


class _HandleMark(StandIn):
    """Tells on an attached model which handle it belongs to; in its copies, that there is none."""

    def __init__(self, handle: "AttentionHandle") -> None:
        self.handle = handle

    def in_copies(self) -> None:
        return None


class AttentionHandle:
    """An attached pipeline or model; also a context manager, for one block, that detaches it.

    Args:
        plans: what to do, per component.
        notes: sentences for the report.
        warnings: what is warned of while it runs, for the report too.
        tracker: follows the denoisers through their generations.
        pipeline: the pipeline, or None for a bare model.
        guard: checks the self-attention of the denoisers, or None.
        graphs: the denoisers' calls as CUDA graphs, or None.
        ahead: what compiles their kernels, and ends with it, or None.

    Attributes:
        ahead: what compiles their kernels, for the report, or None.
    """

    def __init__(
        self,
        plans: tuple[DenoiserPlan | EncoderPlan, ...],
        notes: tuple[str, ...],
        warnings: WarnOnce,
        tracker: StepTracker,
        pipeline: Any = None,
        guard: AttentionGuard | None = None,
        graphs: CudaGraphs | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.ahead = ahead
        self._plans = plans
        self._guard = guard
        self._graphs = graphs
        self._notes = notes
        self._warnings = warnings
        self._tracker = tracker
        self._usable = True
        with ExitStack() as undo:
            if ahead is not None:
                undo.callback(ahead.stop)
            for plan in plans:
                plan.install(undo)
                if plan.layers:
                    attributes = vars(plan.model)
                    attributes[_HANDLE] = _HandleMark(self)
                    undo.callback(attributes.pop, _HANDLE, None)
            notice_end(pipeline, self.end_request, undo)
            undo.callback(self.end_request)
            self._undo = undo.pop_all()

    def report(self) -> AttentionReport:
        """Return what ran in every layer so far, and why; before the first call, what would."""
        of_plans = (note for plan in self._plans for note in plan.notes())
        notes = (*self._notes, *of_plans, *self._warnings.given)
        return AttentionReport(
            layers=tuple(report for plan in self._plans for report in plan.reports()),
            notes=tuple(dict.fromkeys(notes)),
            gathering=sum_of(
                p.parallel.times() for p in self._plans if isinstance(p, DenoiserPlan)
            ),
            guard=None if self._guard is None else self._guard.report(),
            graphs=None if self._graphs is None else self._graphs.report(),
            ahead=None if self.ahead is None else self.ahead.report(),
        )

    def sizes(self) -> tuple[tuple[LayerSite, int, int, int], ...]:
        """Return where every layer sits, with its heads, key heads and head size."""
        return tuple(
            (layer.site, layer.usual.num_heads, layer.usual.num_kv_heads, layer.usual.head_size)
            for layer in self.layers()
        )

    def layers(self) -> tuple[ModuleAttention, ...]:
        """Return the layers of every component, in the order of its modules."""
        return tuple(layer for plan in self._plans for layer in plan.layers)

    def end_request(self) -> None:
        """Drop what layers keep for the generation that ran last, to carry from step to step.

        That happens by itself when a call of a diffusers pipeline ends, when the next generation
        begins, and in `remove`; loops of one's own, and calls that failed, may say so.
        """
        self._tracker.end_request()

    def remove(self) -> None:
        """Put everything back as `apply` found it; a second call does nothing.

        What was set on a processor since `apply` stays on it, and a processor that was set since
        `apply` stays where it is.
        """
        self._usable = False
        self._undo.close()

    def __enter__(self) -> "AttentionHandle":
        """Return itself.

        Raises:
            UsageError: it was detached, or runs a block already, whose rest would then be stock.
        """
        if not self._usable:
            raise UsageError(
                "an attention handle must be entered once, before remove(), got one that was "
                "detached or entered already; call apply() again for a new one"
            )
        self._usable = False
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def apply(
    target: Any,
    *,
    attention_backend: AttentionBackendEnum | str | None = None,
    attention_backend_config: str
    | os.PathLike[str]
    | Mapping[str, object]
    | BackendConfig
    | None = None,
    component_attention_backends: Mapping[str, AttentionBackendEnum | str | None]
    | str
    | None = None,
    attention_config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    attention_auto_table: str | os.PathLike[str] | None = None,
    latent_grid: Sequence[int] | str | None = None,
    text_rows: Sequence[int] | str | None = None,
    strict: bool = False,
    scope: SelectionScope | None = None,
    train: bool = False,
    attention_guard: Mapping[str, object] | float | str | AttentionGuard | None = None,
    cuda_graph: bool = False,
    compile_ahead: bool | Mapping[str, object] = False,
) -> AttentionHandle:
    """Do the attention of a pipeline's denoisers and encoders with this package's layers.

    Everything is checked before anything is changed. Autoencoders are left alone. A processor set
    on an attached model, as by an IP-adapter, is taken over at the next call where that can be, and
    else runs as it is; either way with a warning, and it stays after `remove`.

    After `multimodal_gen.init_parallel`, this process is one of several ranks: they share the
    tokens of every denoiser, or compute a guidance branch each, and all of them get what one
    process would. Every rank has to make the same calls, with the same inputs.

    Args:
        target: a diffusers pipeline, or one model of diffusers or transformers.
        attention_backend: backend of every layer; None or "auto" for an automatic choice.
        attention_backend_config: its parameters: a mapping, a path to a JSON or YAML file, a
            JSON object, or `k=v,k=v`.
        component_attention_backends: backend by `component` or `component.role`, e.g.
            `{"transformer.cross": "torch_sdpa", "text_encoder": "fa"}`.
        attention_config: rules over component, role, layers and steps; excludes
            `attention_backend`.
        attention_auto_table: a file that `sglang attention bench --save` wrote on this machine,
            which automatic choices then go by.
        latent_grid: for models that this package has no adapter for, (T, H, W) of the latent
            after patching, or "21x45x80"; sparse backends need it.
        text_rows: where text lies among the video's tokens of such models: the first row and the
            row after the last, or "0-226"; None where it is not among them.
        strict: refuse the documented fallbacks too.
        scope: all of the above but `latent_grid` and `text_rows`, built already; excludes them.
        train: make what a method trains and the checkpoint lacks, with zeros, as parameters of the
            denoisers: the gates of `video_sparse_attn` (`<attention>.to_gate_compress`) and the
            projections of `sla_attn` (`<attention>.proj_l`). Make the optimiser afterwards, and
            save the model before `remove`, which takes them out; `apply` finds them in the folder.
        attention_guard: tests the outputs of self-attention in the denoisers to be finite, and
            compares 64 rows of one of 17 calls of a layer, the layers in turn, with exact
            attention. A layer whose worst head has a larger relative L2 error than this runs in
            16 bits from its next call on, until `remove`. A number bounds backends that round to
            8 bits or less; a mapping, or `k=v,k=v`, has `quantized` (0.05 by default) and
            `sparse`, the bound of sparse methods (by default none: what they drop is meant),
            whose layers then run dense. An output that is not finite is computed again densely at
            once, whatever the bounds. Ranks decide together. Not under CUDA graphs. Or an
            `AttentionGuard`, whose bounds count and whose findings are gone on with. None, or
            False: no guard.
        cuda_graph: keep calls of the denoisers as CUDA graphs: the second of a kind is captured,
            and later ones are replayed on copies of their arguments, with copies of the outputs.
            Where a graph could not repeat a call it is refused, or, where that turns out later, a
            call runs without one, with a warning (an error under `strict`). A denoiser has at most
            8, until `remove`; the report says how much memory they take.
        compile_ahead: compile the kernels that the pipeline will need in other processes from now
            on, until `remove`; nothing waits for them. A mapping has arguments that it will be
            called with and that decide about kernels, such as `{"height": 480, "width": 832,
            "num_frames": 81}`; what it lacks has the call's defaults. On one NVIDIA GPU, where the
            pipeline is already, or is offloaded from.

    Returns:
        The handle, to read the report and to take everything back; `applied` finds it again.

    Raises:
        UsageError: the target is no pipeline or model, or is attached already; or ranks are to
            share the tokens of denoisers none of which can be split; or `attention_guard` is given,
            and a denoiser does not tell its steps; or `cuda_graph` or `compile_ahead` is, and there
            are several ranks; or `cuda_graph`, and a CUDA graph cannot repeat a denoiser's calls;
            or `compile_ahead`, and there is no NVIDIA GPU, the target is no pipeline, or is not
            called so; or `train`, and a parameter is for calls without gradients.
        ConfigError: a setting cannot be read or does not fit its backend.
        UnsupportedBackendError: a requested backend cannot serve a layer; or, with `strict`, a
            sparse one was asked for, and the latent grid of no denoiser is known.
        ComponentAttentionBackendNotAppliedError: a component override, or a rule,
            reaches no attention layer.
        NothingAppliedError: no attention module of a denoiser could be taken over.
    """
    settings: dict[str, Any] = {
        "attention_backend": attention_backend,
        "attention_backend_config": attention_backend_config,
        "component_attention_backends": component_attention_backends,
        "attention_config": attention_config,
        "attention_auto_table": attention_auto_table,
    }
    for name, flag in (("strict", strict), ("train", train), ("cuda_graph", cuda_graph)):
        expect(name, flag, bool, "True or False")
    words = "True, False or a mapping of arguments of the pipeline's call"
    expect("compile_ahead", compile_ahead, bool | Mapping, words)
    expect("scope", scope, SelectionScope | None, "a SelectionScope or None")
    if scope is None:
        scope = scope_from(**settings, strict=strict)
    elif strict or any(value is not None for value in settings.values()):
        raise UsageError("scope must be given alone, got further settings too")
    # A pipeline is told what it should know, whatever others were told before.
    scope = replace(scope, warnings=WarnOnce())
    described = describe_tokens(latent_grid, text_rows)
    guard = attention_guard
    if not isinstance(guard, AttentionGuard):
        bounds = parse_guard_bounds(guard)
        guard = None if bounds is None else AttentionGuard(bounds)
    graphs = _graphs(scope, guard, train=train) if cuda_graph else None
    components = find_components(target)
    pipeline = None if isinstance(unwrap(target), nn.Module) else target
    tracker = StepTracker(lambda: getattr(pipeline, "scheduler", None))
    asked = (scope, tracker, pipeline, parallel_groups(), described)
    plans: tuple[DenoiserPlan | EncoderPlan, ...] = tuple(
        DenoiserPlan(each, *asked, train=train, guard=guard, graphs=graphs)
        if each.kind is Kind.DENOISER
        else EncoderPlan(each, scope)
        for each in components
        if each.kind is not Kind.AUTOENCODER
    )
    notes = tuple(
        f"{each.name}: {type(each.model).__name__} left alone"
        for each in components
        if each.kind is Kind.AUTOENCODER
    )
    # A pipeline is about its denoisers: taking over nothing but its encoders is not enough.
    denoisers = [plan for plan in plans if isinstance(plan, DenoiserPlan)]
    if not any(plan.layers for plan in denoisers or plans):
        raise _nothing_applied(components, denoisers)
    _require_undescribed(denoisers, described)
    _require_grid(denoisers, scope)
    require_split([plan.parallel for plan in denoisers], parallel_groups())
    if graphs is not None and not any(plan.layers for plan in denoisers):
        raise UsageError(
            "cuda_graph must be given for a denoiser, got a target without one; leave it out"
        )
    check_overrides(scope, [layer.site for plan in plans for layer in plan.layers])
    if guard is not None:
        _warn_unguarded(denoisers, guard, scope)
    ahead = None
    if compile_ahead is not False:
        arguments = {} if compile_ahead is True else compile_ahead
        ahead = _ahead(pipeline, arguments, scope, described, train=train)
    return AttentionHandle(plans, notes, scope.warnings, tracker, pipeline, guard, graphs, ahead)


def applied(target: Any) -> AttentionHandle | None:
    """Return the live handle of a pipeline or model, for who did not keep what `apply` returned.

    Args:
        target: what was given to `apply`, or a pipeline that holds it.

    Returns:
        The handle, until `remove`; None where nothing is attached. Where components were attached
        one by one, it is the handle of the first of them.

    Raises:
        UsageError: the target is no pipeline or model.
    """
    for component in find_components(target):
        mark = vars(component.model).get(_HANDLE)
        if mark is not None:
            handle: AttentionHandle = mark.handle
            return handle
    return None


def _graphs(scope: SelectionScope, guard: AttentionGuard | None, *, train: bool) -> CudaGraphs:
    """Return what keeps calls as CUDA graphs; refuse what none of them can be given with."""
    asked = (
        ("left out on several ranks, which exchange by the host", parallel_groups() is not None),
        ("left out where train is True: a replay records no gradients", train),
        ("given without attention_guard, which decides in every step", guard is not None),
    )
    for rule, is_so in asked:
        if is_so:
            raise UsageError(f"cuda_graph (--cuda-graph) must be {rule}, got both; leave one out")
    return CudaGraphs(scope)


def _ahead(
    pipeline: Any,
    asked: Mapping[str, object],
    scope: SelectionScope,
    described: DescribedTokens | None,
    *,
    train: bool,
) -> Ahead:
    """Begin to compile what a pipeline will launch; refuse where that cannot be known."""
    for rule, is_so in (
        ("left out where train is True: what gradients launch is not known before", train),
        ("given for a pipeline, whose call tells what a model will meet", pipeline is None),
    ):
        if is_so:
            raise UsageError(f"compile_ahead must be {rule}; leave it out here")
    generation = generation_of(pipeline, asked, scope, described)
    return Ahead(generation, generation.device)


def _nothing_applied(
    components: tuple[Component, ...], denoisers: list[DenoiserPlan]
) -> NothingAppliedError:
    looked_at = ", ".join(f"{c.name} ({type(c.model).__name__})" for c in components)
    failures = [reason for plan in denoisers for reason in plan.failures]
    why = ""
    if failures:
        why = f"; of {len(failures)} attention modules: {'; '.join(dict.fromkeys(failures))}"
    return NothingAppliedError(
        f"apply() must find attention modules to take over, it looked at "
        f"{looked_at or 'no model at all'} and found none that it can{why}"
    )


def _warn_unguarded(
    denoisers: list[DenoiserPlan], guard: AttentionGuard, scope: SelectionScope
) -> None:
    """Tell where there is nothing to guard, and of sparse methods that round as well.

    A bound of rounding may seem to be for the latter.
    """
    asked = f"attention_guard (--attention-guard) {guard.bounds}"
    bound = [
        (plan.title, entry.primary)
        for plan in denoisers
        for layer in plan.layers
        if layer.site.role is AttentionRole.SELF
        for entry in layer.layer.schedule()
    ]
    if not any(each.is_sparse or each.rounds for _, each in bound):
        titles = ", ".join(plan.title for plan in denoisers) or "no denoiser"
        scope.warnings.warn(
            f"{asked} guards nothing: no self-attention layer of {titles} is approximate; name a "
            f"sparse backend, or one that rounds to 8 bits, or leave it out"
        )
    unbounded = {
        (title, each.selection.backend)
        for title, each in bound
        if guard.bounds.sparse is None and each.is_sparse and each.operand_bits < 16
    }
    for title, name in sorted(unbounded):
        scope.warnings.warn(
            f"{asked} does not bound {name} of {title}, which is sparse and rounds to 8 bits: its "
            f"outputs are only tested to be finite; sparse=B, e.g. sparse=0.3, has it compared "
            f"with exact attention, except where a gate or a trained projection adds to it"
        )


def _require_undescribed(denoisers: list[DenoiserPlan], described: DescribedTokens | None) -> None:
    if described is not None and not any(plan.is_described for plan in denoisers):
        names = ", ".join(plan.title for plan in denoisers) or "no denoiser"
        raise UsageError(
            f"latent_grid and text_rows (--latent-grid, --text-rows) must be given for models "
            f"without an adapter, got {described} for {names}, whose adapter reads them off every "
            f"call; leave them out"
        )


def _require_grid(denoisers: list[DenoiserPlan], scope: SelectionScope) -> None:
    """Warn, or refuse under strict, where sparse attention was asked for and no denoiser has any.

    A pipeline whose denoiser has some may have small models, too, that have none.
    """
    taken = [plan for plan in denoisers if plan.layers]
    if not all(plan.lost_sparse for plan in taken):
        return
    for plan in taken:
        if scope.strict:
            raise UnsupportedBackendError(
                f"{plan.unknown_grid}, which --strict-attention refuses; give latent_grid "
                f"(--latent-grid), name a dense backend, or leave strict out"
            )
        scope.warnings.warn(plan.unknown_grid)
