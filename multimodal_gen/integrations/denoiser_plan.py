"""What `apply` does to one denoiser: planned first, then carried out."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from multimodal_gen.errors import UsageError, listed
from multimodal_gen.integrations.checkpoint_files import find_checkpoint
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
from multimodal_gen.integrations.trained_layers import (
    GATE,
    PROJECTION,
    SpareGate,
    Stored,
    attach_child,
    attach_projection,
    find_gates,
    find_projections,
    new_gate,
    new_projection,
    owner_of,
    stored_layers,
    stored_parameters,
)
from multimodal_gen.runtime.described_tokens import DescribedTokens
from multimodal_gen.runtime.distributed.groups import ParallelGroups
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.generator.weights_file import TRAINED
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
        gated = {m.name: m.module for m in self._gated() if m.layer.takes_gate}
        stored = stored_parameters(component.model) if self._patched else {}
        wanted = {m.name: m.module for m in self._gated()} if "gate" in scope.spare else gated
        self._gates = find_gates(component.model, wanted, stored)
        sizes = {m.name: m.layer.usual.head_size for m in self._patched}
        projected = {m.name: sizes[m.name] for m in self._patched if m.layer.takes_projection}
        sizes = sizes if "projection" in scope.spare else projected
        self._projections = find_projections(stored, sizes)
        self._lost = self._lost_parts(bool(gated), bool(projected))
        self._unread = [
            *self._unread_parts(stored, GATE, "coarse", self._gated(), wanted),
            *self._unread_parts(stored, PROJECTION, "linear", self._patched, sizes),
        ]
        self._new_parts = self._make_trainable(gated, projected) if train else 0

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
        if self._lost:
            yield self._lost
        yield from self._unread
        weighing = sum(m.name in self._gates and m.layer.takes_gate for m in self._patched)
        if weighing and not self._new_parts:
            yield (
                f"{name}: {weighing} layers weigh the coarse branch by the gates of the checkpoint"
            )
        if self._new_parts:
            yield (
                f"{name}: {self._new_parts} layers got new gates or projections to train, which "
                f"are zero at first, are saved with the model, and leave it with remove()"
            )
        elif projecting := sum(
            m.name in self._projections and m.layer.takes_projection for m in self._patched
        ):
            yield f"{name}: {projecting} layers project the linear branch as the checkpoint does"
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
            if patched.name in self._gates:
                gate = self._gates[patched.name]
                used = patched.layer.takes_gate
                attach_child(patched.module, GATE, gate if used else SpareGate(gate), undo)
            if patched.name in self._projections:
                projection = self._projections[patched.name]
                attach_projection(patched.module, projection, undo)
                patched.layer.project(projection, (patched.module, PROJECTION))
                undo.callback(patched.layer.project, None)
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

    def _gated(self) -> Iterator[_PatchedModule]:
        """Yield the modules whose processors can hand a gate to their layer."""
        for patched in self._patched:
            cls = type(patched.found)
            known = _is_diffusers(cls) and cls.__name__ in self._adapter.gated
            own_tokens = patched.layer.site.role is AttentionRole.SELF
            if known and own_tokens:
                yield patched

    def _make_trainable(self, gated: dict[str, nn.Module], projected: dict[str, int]) -> int:
        """Let gates and projections be trained, and make those that are missing; returns how many.

        Raises:
            UnsupportedBackendError: a layer's backend has no backward pass.
            UsageError: a parameter of its sparse method is for calls without gradients.
        """
        for patched in self._patched:
            patched.layer.layer.require_backward()
        model = self.model
        gates = {n: new_gate(m, compute_dtype(m, model)) for n, m in gated.items()}
        projections = {n: new_projection(size) for n, size in projected.items()}
        new = len((gates.keys() - self._gates) | (projections.keys() - self._projections))
        self._gates = gates | self._gates
        self._projections = projections | self._projections
        for part in (*self._gates.values(), *self._projections.values()):
            part.requires_grad_(True)
        return new

    def _lost_parts(self, gated: bool, projected: bool) -> str:
        """Say which trained parts a checkpoint may have that cannot be read again, if any."""
        if not (gated or projected) or hasattr(self.model, TRAINED):
            return ""
        files = find_checkpoint(self.model)
        if files.folder is not None:
            return ""
        parts = " and ".join(
            part for part, is_taken in ((GATE, gated), (PROJECTION, projected)) if is_taken
        )
        start = (
            f"{self._component.name}: trained layers that its checkpoint may have ({parts}) are "
        )
        if next(self.model.parameters()).is_meta:
            return f"{start}looked for when it is loaded"
        lost = f"{start}not used, its files are unknown: {files.reason}"
        if files.source:
            self._scope.warnings.warn(lost)
            return ""  # which the report has from there
        return lost

    def _unread_parts(
        self,
        stored: Stored,
        part: str,
        branch: str,
        places: Iterable[_PatchedModule],
        read: Collection[str],
    ) -> Iterator[str]:
        """Say which trained parts of its checkpoint are not used.

        What no layer can be given, though a layer's method takes it, is warned of.

        Args:
            stored: what came with the model.
            part: what they are called.
            branch: what they are for.
            places: the modules that can be given one.
            read: the names of those that it is read for.
        """
        came = stored_layers(stored, part)
        known = {m.name for m in places}
        lost = [x for x in came if owner_of(x, known) is None]
        idle = [x for x in came if x not in lost and owner_of(x, read) is None]
        cls = type(self.model).__name__
        for unread, why in (
            (lost, f"no layer of {cls} can be given them"),
            (idle, f"those layers run no method with a {branch} branch"),
        ):
            if not unread:
                continue
            sentence = (
                f"{self._component.name}: trained layers of its checkpoint ({listed(unread, 1)}) "
                f"are not used, {why}: the {branch} branch that they were trained for is missing"
            )
            taken = any(x.takes_gate if part == GATE else x.takes_projection for x in self.layers)
            if taken and unread is lost:
                self._scope.warnings.warn(sentence)  # which the report has from there
            else:
                yield sentence

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
