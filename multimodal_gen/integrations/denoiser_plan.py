"""What `apply` does to one denoiser: planned first, then carried out."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.components import Component, compute_dtype, whole_number
from multimodal_gen.integrations.cuda_graphs import CudaGraphs, GraphedDenoiser
from multimodal_gen.integrations.forward_hooks import DenoiserHooks, forget_checkpoints
from multimodal_gen.integrations.guidance_branch import note_branch_names
from multimodal_gen.integrations.hooks import StandIn, untraced_hook
from multimodal_gen.integrations.models.adapter import ModelAdapter, adapter_of
from multimodal_gen.integrations.models.registry import find_adapter
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.integrations.parallel.plan import ParallelPlan, is_split
from multimodal_gen.integrations.processor_patch import (
    LAYER,
    CannotPatchError,
    patch,
    patched_class,
    unpatch,
)
from multimodal_gen.integrations.scopes import calibrated, without_sparse
from multimodal_gen.integrations.steps import StepTracker
from multimodal_gen.integrations.trained_layers import TrainedParts
from multimodal_gen.runtime.described_tokens import DescribedTokens
from multimodal_gen.runtime.distributed.groups import ParallelGroups
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PatchedModule:
    """One attention module: its processor as found, and the one that replaces it."""

    name: str
    module: nn.Module
    found: Any
    replacement: Any
    layer: ModuleAttention


class DenoiserPlan:
    """What `apply` will do to a denoiser; making it changes nothing.

    Args:
        component: the denoiser.
        scope: what the user configured.
        tracker: follows the pipeline's steps.
        pipeline: the pipeline, or None for a bare model.
        groups: the groups of this process where it is one of several ranks.
        described: what the user says of its tokens, for a model without an adapter.
        train: whether it will be trained: trained parts that it lacks are made.
        guard: checks its self-attention while it runs, or None.
        graphs: keep its calls as CUDA graphs, or None.

    Attributes:
        model: the model.
        failures: why attention modules are left alone, one reason per module.
        parallel: how it runs on several ranks.

    Raises:
        UsageError: the model is attached already, under diffusers' context parallelism, or
            scheduled by denoising steps that it does not tell; or ranks share its tokens, which
            it has too few heads for; or a CUDA graph cannot repeat its calls.
        UnsupportedBackendError: a requested backend cannot serve one of them.
    """

    def __init__(
        self,
        component: Component,
        scope: SelectionScope,
        tracker: StepTracker,
        pipeline: Any = None,
        groups: ParallelGroups | None = None,
        described: DescribedTokens | None = None,
        *,
        train: bool = False,
        guard: AttentionGuard | None = None,
        graphs: CudaGraphs | None = None,
    ) -> None:
        adapter = find_adapter(component.model)
        self._described = described if adapter is None else None
        if self._described is not None:
            adapter = adapter_of(self._described)
        self._component, self.model = component, component.model
        self._known = adapter is not None
        self._adapter = adapter or ModelAdapter(classes=())
        self._scope, self._dropped = (scope, False) if adapter else without_sparse(scope)
        self._scope = calibrated(self._scope, component.model, component.name)
        self.failures: list[str] = []
        self._installed = False
        self._tracker = tracker
        self._patched = list(self._plan())
        # Processors that were set since, and cannot be taken over, by name of their module.
        self._left: dict[str, object] = {}
        heads = [m.layer.usual.num_heads for m in self._patched if is_split(m.layer.site.role)]
        self.parallel = ParallelPlan(component, adapter, heads, groups, pipeline)
        self._hooks = DenoiserHooks(
            component.model,
            self._adapter,
            component.name,
            tracker,
            pipeline,
            self.parallel.splitter,
            [patched.name for patched in self._patched],
        )
        self._refuse_steps()
        self._guard = guard
        self._refuse_guard()
        self._graphed = None if graphs is None or not self._patched else self._graph(graphs)
        layers = {m.name: (m.module, m.layer) for m in self._patched}
        self._trained = TrainedParts(component, scope, layers, [*self._gated()], train=train)

    @property
    def layers(self) -> tuple[ModuleAttention, ...]:
        """The layers, in the order of the model's modules."""
        return tuple(patched.layer for patched in self._patched)

    def reports(self) -> Iterator[LayerReport]:
        """Yield what ran in every layer, and in which calls of the denoiser it did not."""
        for patched in self._patched:
            yield replace(patched.layer.report(), not_run=self._hooks.not_run(patched.name))

    @property
    def is_described(self) -> bool:
        """Whether it goes by what the user says of its tokens."""
        return self._described is not None

    @property
    def title(self) -> str:
        """Its name in the pipeline, and its class."""
        return f"{self._component.name} ({type(self.model).__name__})"

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the report should know."""
        name, cls = self._component.name, type(self.model).__name__
        yield from self._without_adapter()
        if self._patched and not self._hooks.tells_steps:
            yield f"{name}: {cls} does not tell its denoising step, every call counts as step 0"
        yield from self.parallel.notes()
        yield from (f"{name}: {sentence}" for sentence in self._hooks.caches)
        yield from self._trained.notes
        for reason, count in Counter(self.failures).items():
            yield f"{name}: {count} modules left alone, {reason}"
        if self._installed:
            yield from self._changed()

    def _changed(self) -> Iterator[str]:
        """Say what became of modules that others changed since, those alike in one sentence."""
        changed: dict[str, list[str]] = {}
        for patched in self._patched:
            processor: object = patched.module.processor
            backend = getattr(patched.replacement, LAYER, None)
            if processor is not patched.replacement:
                changed.setdefault("got another processor after apply()", []).append(patched.name)
            elif backend is not patched.layer:
                handed = f"was handed to diffusers, its backend is {backend}"
                changed.setdefault(handed, []).append(patched.name)
        for what, modules in changed.items():
            more = f" (and {len(modules) - 1} more)" if len(modules) > 1 else ""
            yield f"{self._component.name}: {modules[0]}{more} {what}"

    def _without_adapter(self) -> Iterator[str]:
        """Say what is known of the tokens of a model without an adapter."""
        if self._described is not None:
            start = f"{self._component.name}: {type(self.model).__name__} has no adapter"
            yield f"{start}, its tokens are as given: {self._described}"
        elif not self._known and self._patched:
            yield self.unknown_grid

    @property
    def unknown_grid(self) -> str:
        """What it means that the latent grid of a model without an adapter is unknown."""
        dense = ", so what asked for a sparse backend runs dense" if self._dropped else ""
        return (
            f"{self._component.name}: {type(self.model).__name__} has no adapter, its "
            f"latent grid is unknown{dense}"
        )

    @property
    def lost_sparse(self) -> bool:
        """Whether a sparse backend was asked for its layers, and is left to automatic choice."""
        return self._dropped and bool(self._patched)

    def install(self, undo: ExitStack) -> None:
        """Carry the plan out; `undo` takes the steps that take it back."""
        model = self.model
        for index, patched in enumerate(self._patched):
            _register_like_stock(patched)
            patched.module.processor = patched.replacement
            undo.callback(self._restore, index)
        self._trained.install(undo)
        if not self._patched:
            return
        self._installed = True
        undo.callback(setattr, self, "_installed", False)
        self._tracker.when_ended.append(self._end_request)
        undo.callback(self._tracker.when_ended.remove, self._end_request)
        undo.callback(self._hooks.end_context)
        undo.callback(forget_checkpoints, model)
        self.parallel.install_outside(undo)
        again = model.register_forward_pre_hook(untraced_hook(self._take_over_again))
        undo.callback(again.remove)
        before = model.register_forward_pre_hook(self._hooks.before, with_kwargs=True)
        undo.callback(before.remove)
        if self._guard is not None:  # which is to know the step
            self._install_guard(self._guard, undo)
        self.parallel.install(undo)
        after = model.register_forward_hook(self._hooks.after, always_call=True)
        undo.callback(after.remove)
        note_branch_names(model, undo)
        if self._graphed is not None:
            self._graphed.install(undo)

    def _install_guard(self, guard: AttentionGuard, undo: ExitStack) -> None:
        """Let `guard` serve the layers, and read what it found before every call of the model."""
        for patched in self._patched:
            patched.layer.guard_by(guard)
            undo.callback(patched.layer.guard_by, None)

        def settle(model: nn.Module, args: object) -> None:
            del model, args
            guard.settle()

        undo.callback(self.model.register_forward_pre_hook(untraced_hook(settle)).remove)

    def _restore(self, index: int) -> None:
        patched = self._patched[index]
        # A processor set after apply() is the user's, and stays.
        if patched.module.processor is patched.replacement:
            patched.module.processor = unpatch(patched.replacement)

    def _take_over_again(self, model: nn.Module, args: object) -> None:
        """Take over processors that were set since `apply`, where that can be; warn in any case.

        An IP-adapter and fused projections bring processors of their own.
        """
        del model, args
        taken: Counter[str] = Counter()
        for index, patched in enumerate(self._patched):
            processor: Any = patched.module.processor
            if processor is patched.replacement or self._left.get(patched.name) is processor:
                continue
            try:
                self._patched[index] = again = self._patch_again(patched, processor)
            except CannotPatchError as error:
                self._left[patched.name] = processor
                self._scope.warnings.warn(
                    f"{self._component.name}: processors that were set after apply() run as they "
                    f"are, without its backends: {error}"
                )
                continue
            _register_like_stock(again)
            patched.module.processor = again.replacement
            again.layer.guard_by(self._guard)
            taken[type(processor).__name__] += 1
        for cls, count in taken.items():
            self._scope.warnings.warn(
                f"{self._component.name}: {count} attention modules got a {cls} after apply(), "
                f"which was taken over too; remove() leaves it there"
            )
        if any(getattr(p.replacement, LAYER, None) is not p.layer for p in self._patched):
            self._scope.warnings.warn(
                f"{self._component.name}: set_attention_backend after apply() handed attention "
                f"modules to diffusers, where they stay until remove(); choose backends in apply()"
            )

    def _patch_again(self, patched: _PatchedModule, processor: Any) -> _PatchedModule:
        """Return a module with its new processor taken over, on the same layer where that fits.

        Raises:
            CannotPatchError: the processor cannot be taken over.
        """
        if not callable(processor) or isinstance(processor, StandIn):
            raise CannotPatchError(f"{type(processor).__name__} is not one of diffusers")
        again = self._patch(patched.layer.site, patched.module, processor)
        if again.layer.masks_padding != patched.layer.masks_padding:
            return again
        again.replacement.__dict__[LAYER] = patched.layer
        return replace(again, layer=patched.layer)

    def _end_request(self, request_id: str) -> None:
        self.parallel.end_request()
        for patched in self._patched:
            patched.layer.end_request(request_id)

    def _gated(self) -> Iterator[str]:
        """Yield the names of modules whose processors can hand a gate to their layer."""
        for patched in self._patched:
            cls = type(patched.found)
            known = _is_diffusers(cls) and cls.__name__ in self._adapter.gated
            own_tokens = patched.layer.site.role is AttentionRole.SELF
            if known and own_tokens:
                yield patched.name

    def _refuse_steps(self) -> None:
        if self._hooks.tells_steps:
            named = (steps for patched in self._patched for steps in patched.layer.steps())
            self._hooks.named_by_sigma = next((steps for steps in named if steps.sigma), None)
            if self._hooks.named_by_sigma is not None:
                self._tracker.require_sigmas(self._hooks.named_by_sigma)
            if self._hooks.named_by_sigma is not None or "sigmas" in self._scope.spare:
                self._tracker.reads_sigmas = True
            return
        for index, rule in enumerate(self._scope.rules):
            if rule.when is not None and any(rule.matches(x.layer.site) for x in self._patched):
                raise UsageError(
                    f"rules[{index}] must have no steps, got {rule.when} for "
                    f"{self._component.name}: calls of {type(self.model).__name__} "
                    f"have no timestep, and there is no scheduler with a step_index; drop steps, "
                    f"or name another component"
                )

    def _graph(self, graphs: CudaGraphs) -> GraphedDenoiser:
        """Return what keeps its calls as CUDA graphs; refuse what these cannot repeat."""
        if self._adapter.causal_blocks is not None:
            raise UsageError(
                f"cuda_graph (--cuda-graph) must be left out for models that work chunk by chunk, "
                f"got {self.title}"
            )
        return GraphedDenoiser(
            graphs,
            self.model,
            self._component.name,
            lambda: self.layers,
            lambda: self._hooks.num_calls,
        )

    def _refuse_guard(self) -> None:
        if self._guard is not None and self._patched and not self._hooks.tells_steps:
            raise UsageError(
                f"attention_guard (--attention-guard) must check models that tell their denoising "
                f"step, by which layers take turns, got {self.title}, whose calls have no "
                f"timestep, and there is no scheduler with a step_index; leave it out"
            )

    def _plan(self) -> Iterator[_PatchedModule]:
        found = []
        for path, module in self.model.named_modules():
            processor = getattr(module, "processor", None)
            if callable(processor):
                name = path.replace("_orig_mod.", "")
                self._check(name, processor)
                found.append((name, module, processor, self._adapter.role_of(name, module)))
        totals = Counter(role for *_, role in found)
        indices: Counter[AttentionRole] = Counter()
        for name, module, processor, role in found:
            site = LayerSite(
                name=name,
                component=self._component.name,
                role=role,
                layer=indices[role],
                num_layers=totals[role],
            )
            try:
                patched = self._patch(site, module, processor)
            except CannotPatchError as error:
                self.failures.append(str(error))
                continue
            indices[role] += 1
            yield patched

    def _patch(self, site: LayerSite, module: nn.Module, processor: Any) -> _PatchedModule:
        cls = type(processor)
        stock = _is_diffusers(cls)
        replacements = self._adapter.replacements.get(cls.__name__) if stock else None
        patched = patched_class(cls, replacements)
        params = attention_params(module)
        if params is None:
            raise CannotPatchError(f"{type(module).__name__} does not say its number of heads")
        if self._adapter.repeats_keys:
            params = params._replace(num_kv_heads=params.num_heads)
        dtype = compute_dtype(module, self.model)
        # A forward or a processor of the user's own may mean something else by its mask.
        masks_padding = (
            stock
            and cls.__name__ in self._adapter.masks_padding
            and _is_diffusers(type(self.model).forward)
        )
        layer = ModuleAttention(site, params, dtype, self._scope, masks_padding=masks_padding)
        return _PatchedModule(
            name=site.name,
            module=module,
            found=processor,
            replacement=patch(processor, layer, patched),
            layer=layer,
        )

    def _check(self, name: str, processor: Any) -> None:
        if isinstance(processor, StandIn):
            raise UsageError(
                f"target must not be attached twice, {self._component.name}.{name} already is; "
                f"call remove() on its handle first"
            )
        if getattr(processor, "_parallel_config", None) is not None:
            raise UsageError(
                f"target must not use diffusers' context parallelism, {self._component.name}."
                f"{name} does; apply() before, or without, enable_parallelism()"
            )


def _is_diffusers(code: Any) -> bool:
    return str(code.__module__).startswith("diffusers.")


def attention_params(module: nn.Module) -> AttentionParams | None:
    """Read heads and sizes off an attention module of diffusers, or return None."""
    heads = whole_number(module, "heads", "num_heads", "num_attention_heads")
    queries = _projected(module, "to_q", "to_query")
    width = whole_number(module, "inner_dim") or queries
    size = whole_number(module, "head_dim", "dim_head") or (
        width // heads if heads and width else None
    )
    if not heads or not size:
        return None
    keys = whole_number(module, "inner_kv_dim") or _projected(module, "to_k", "to_key")
    kv_heads = keys // size if keys and keys % size == 0 else heads
    return AttentionParams(
        num_heads=heads,
        head_size=size,
        num_kv_heads=kv_heads if heads % (kv_heads or heads + 1) == 0 else heads,
    )


def _projected(module: nn.Module, *names: str) -> int | None:
    """Return the channels that a projection makes, by the names that models give it."""
    found = (whole_number(getattr(module, name, None), "out_features") for name in names)
    return next((size for size in found if size is not None), None)


def _register_like_stock(patched: _PatchedModule) -> None:
    """Make the derived class known where diffusers' layer skipping looks the stock one up.

    The registry is looked up by exact class, so an entry for a class of ours affects nothing else.
    """
    from diffusers.hooks._helpers import AttentionProcessorRegistry

    stock = type(patched.found)
    try:
        metadata = AttentionProcessorRegistry.get(stock)
    except ValueError:
        return
    AttentionProcessorRegistry.register(type(patched.replacement), metadata)
