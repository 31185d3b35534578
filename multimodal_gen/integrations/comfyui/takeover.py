"""Does the attention of a MODEL of ComfyUI with this package's layers.

ComfyUI hands every attention call of a model to one function that a node may put into its options.
`take_over` puts a `Takeover` there, and two wrappers with it: one around each sampling run, one
around each call of the denoiser. The second writes down what the layers may know of the call, as
`apply` does for models of diffusers. Nothing of the model itself is changed, but hooks that tell
which attention module runs, while it runs.
"""

import inspect
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from multimodal_gen.errors import (
    ConfigError,
    MultimodalGenError,
    UnsupportedBackendError,
    UsageError,
)
from multimodal_gen.integrations.comfyui.call_layout import (
    as_heads,
    as_mask,
    as_output,
    check_options,
    wants_exact,
)
from multimodal_gen.integrations.comfyui.models import (
    COMPONENT,
    UNKNOWN,
    Call,
    Family,
    Rows,
    attention_sites,
    find_family,
)
from multimodal_gen.integrations.denoiser_context import DenoiserContext
from multimodal_gen.integrations.hooks import untraced_hook
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.integrations.scopes import without_sparse
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, scope_from
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce
from multimodal_gen.runtime.managers.forward_context import TextSpan, use_forward_context
from multimodal_gen.settings import read_mapping

logger = logging.getLogger(__name__)

KEY = "multimodal_gen"
"""What wrappers and the attachment of a MODEL are filed under."""

_OVERRIDE = "optimized_attention_override"
_OTHER = "other"
_FIRST, _LAST = 0.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the node's user chose.

    Attributes:
        backend: name of a backend, or "auto".
        config: its parameters: `k=v,k=v`, a JSON object or a path; "" for its defaults.
        start_percent: share of the noise schedule, in [0, 1], before which layers run dense.
        end_percent: share of it after which they run dense.
        strict: refuse what would fall back.

    Raises:
        ConfigError: a name or a parameter is wrong, or the end is before the start.
    """

    backend: str = "auto"
    config: str = ""
    start_percent: float = _FIRST
    end_percent: float = _LAST
    strict: bool = False

    def __post_init__(self) -> None:
        if not _FIRST <= self.start_percent <= self.end_percent <= _LAST:
            raise ConfigError(
                f"start_percent and end_percent must be in [0, 1], the end not before the start, "
                f"got {self.start_percent} and {self.end_percent}"
            )
        self.scope(None)

    def scope(self, sampling: Any) -> SelectionScope:
        """Return what layers are to select by.

        Args:
            sampling: what converts shares of the schedule to noise levels; None to leave them out.
        """
        outside = []  # the noise levels that run dense; they fall as shares grow
        if sampling is not None and self.start_percent > _FIRST:
            outside.append(f">{float(sampling.percent_to_sigma(self.start_percent)):.6g}")
        if sampling is not None and self.end_percent < _LAST:
            outside.append(f"<{float(sampling.percent_to_sigma(self.end_percent)):.6g}")
        if not outside:
            return scope_from(
                attention_backend=self.backend,
                attention_backend_config=self.config.strip() or None,
                strict=self.strict,
                spell=_spelled,
            )
        config = self.config.strip()
        mapping = read_mapping(config, name="config") if config else None
        top = {"backend": self.backend, **({} if mapping is None else {"config": mapping})}
        rule = {"sigma": ",".join(outside), "backend": "auto"}
        return scope_from(attention_config={**top, "rules": [rule]}, strict=self.strict)


def _spelled(name: str) -> str:
    return {"attention_backend": "backend", "attention_backend_config": "config"}.get(name, name)


class _Site(NamedTuple):
    """An attention module: where it is, and the hook that says when it runs."""

    module: nn.Module
    site: LayerSite
    enter: Callable[..., Any]


# Where calls are filed that come from no attention module that is known.
_OTHER_SITE = LayerSite(name=_OTHER, component=COMPONENT, role=AttentionRole.ENCODER)


@dataclass(kw_only=True, eq=False)
class _Running:
    """A call of the denoiser that runs.

    Attributes:
        owner: the takeover that serves it.
        model: the denoiser.
        sites: its attention modules.
        context: what layers may know of it.
        rows: how the rows of self-attention lie, or None.
        at: the name of the attention module that runs.
        by_rows: contexts of self-attention, by queries and keys.
    """

    owner: "Takeover"
    model: nn.Module
    sites: Mapping[str, _Site]
    context: DenoiserContext
    rows: Rows | None
    at: str = _OTHER
    by_rows: dict[tuple[int, int], DenoiserContext] = field(default_factory=dict)

    def context_of(self, num_queries: int, num_keys: int) -> DenoiserContext:
        """Return the context of a self-attention call, with the grid where its rows hold it."""
        key = (num_queries, num_keys)
        if key not in self.by_rows:
            self.by_rows[key] = self._located(num_queries, num_keys)
        return self.by_rows[key]

    def _located(self, num_queries: int, num_keys: int) -> DenoiserContext:
        if self.rows is None:
            return self.context
        front = self.rows.front_of(num_queries) if num_queries == num_keys else None
        if front is None:
            return replace(
                self.context,
                no_grid=f"some calls of {type(self.model).__name__} have {num_queries} queries and "
                f"{num_keys} keys, where it is known to have {self.rows}",
            )
        span = TextSpan(start=0, length=front) if front else None
        return replace(self.context, latent_grid=self.rows.grid, text_span=span)


_RUNNING: ContextVar[_Running | None] = ContextVar("multimodal_gen_comfyui", default=None)


class _Run:
    """One sampling run: its layers, and what became of its calls.

    Args:
        settings: what the node's user chose.
        sampling: what converts shares of the schedule to noise levels, or None.
    """

    def __init__(self, settings: Settings, sampling: Any) -> None:
        self.warnings = WarnOnce()
        self.scope = replace(settings.scope(sampling), warnings=self.warnings)
        self.request_id = uuid.uuid4().hex[:12]
        self.layers: dict[tuple[str, bool], ModuleAttention] = {}
        self.declined: Counter[str] = Counter()
        self.calls = 0
        self.denoiser_calls: Counter[Any] = Counter()
        self.notes: dict[str, None] = {}
        if self.scope.rules:
            start, end = settings.start_percent, settings.end_percent
            self.notes[f"steps outside of {start:.0%} to {end:.0%} of the noise run dense"] = None

    def enter(self, model: nn.Module, family: Family) -> None:
        """Note which model runs; sparse backends are left to `auto` where its grid is unknown."""
        cls = type(model).__name__
        if family is not UNKNOWN:
            return
        self.scope, dropped = without_sparse(self.scope)
        dense = ", so what asked for a sparse backend runs dense" if dropped else ""
        note = f"{COMPONENT}: {cls} is not known, its latent grid is unknown{dense}"
        if dropped and self.scope.strict:
            raise UnsupportedBackendError(f"{note}; switch strict off, or choose a dense backend")
        if dropped:
            self.warnings.warn(note)
        else:
            self.notes[note] = None

    def layer(
        self, site: LayerSite, params: AttentionParams, dtype: torch.dtype, *, exact: bool = False
    ) -> ModuleAttention:
        """Return the layer of a module, which its first call makes.

        Args:
            site: where the module sits.
            params: what the call looks like.
            dtype: of q, k and v.
            exact: the model asks for a call without rounding; a second layer serves
                it where that one rounds.
        """
        layer = self.layers.get((site.name, False))
        if layer is None:
            layer = ModuleAttention(site, params, dtype, self.scope)
            self.layers[site.name, False] = layer
        rounds = any(entry.primary.operand_bits < 16 for entry in layer.layer.schedule())
        if not exact or not rounds:
            return layer
        if (site.name, True) not in self.layers:
            scope = SelectionScope(warnings=self.warnings)
            self.layers[site.name, True] = ModuleAttention(site, params, dtype, scope)
        return self.layers[site.name, True]

    def report(self, below: str) -> AttentionReport:
        """Return what ran in every layer, and what was handed to `below`."""
        declined = (
            f"{count} calls ran on {below}: {reason}" for reason, count in self.declined.items()
        )
        return AttentionReport(
            layers=tuple(layer.report() for layer in self.layers.values()),
            notes=(*self.notes, *declined, *self.warnings.given),
        )

    def end(self) -> None:
        """Drop what layers keep from step to step."""
        for layer in self.layers.values():
            layer.end_request(self.request_id)


class Takeover:
    """The function that serves a MODEL's attention calls; `take_over` installs it.

    Args:
        settings: what the node's user chose.
        below: the function that was there before, which gets what this one declines; None for
            ComfyUI's own.
        tell: gets the report of every sampling run as text.
    """

    def __init__(
        self,
        settings: Settings,
        below: Callable[..., torch.Tensor] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.below = below
        self._tell = tell
        self._run: _Run | None = None
        self._depth = 0  # of sampling runs in each other
        self._last = AttentionReport(layers=(), notes=("no sampling run so far",))
        self._sites: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        func: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Return attention of a call, as ComfyUI makes it of the functions that it has itself.

        Args:
            func: ComfyUI's own function.
            q: [B, Sq, H * D], or with `skip_reshape` [B, H, Sq, D].
            k: the same with Sk, and fewer heads with `enable_gqa`.
            v: as `k`.
            heads: H.
            mask: of pairs, keys or scores.
            attn_precision: dtype of the scores, or None.
            skip_reshape: heads are split already.
            skip_output_reshape: heads stay split in the output.
            **options: `scale`, `enable_gqa`, and what concerns ComfyUI alone.

        Returns:
            [B, Sq, H * D], or with `skip_output_reshape` [B, H, Sq, D].

        Raises:
            MultimodalGenError: strict, and the call cannot be served.
        """
        running = _RUNNING.get()
        try:
            if running is None or running.owner is not self:
                raise UsageError("the model does not say when it is called")
            check_options(q, attn_precision, options)
            exact = wants_exact(q, attn_precision, options)
            layout = (skip_reshape, skip_output_reshape)
            return self._attend(running, (q, k, v), heads, mask, layout, options, exact=exact)
        except MultimodalGenError as error:
            self._decline(error)
        given = {**options, "mask": mask, "attn_precision": attn_precision}
        given |= {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        if self.below is not None:
            return self.below(func, q, k, v, heads, **given)
        return func(q, k, v, heads, **given)

    def _attend(
        self,
        running: _Running,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        heads: int,
        mask: torch.Tensor | None,
        split: tuple[bool, bool],
        options: dict[str, Any],
        *,
        exact: bool,
    ) -> torch.Tensor:
        assert self._run is not None, "a call of the denoiser runs"
        query = as_heads(qkv[0], heads, None, split=split[0])
        size = query.shape[3] if options.get("enable_gqa") else None
        key, value = (as_heads(x, heads, size, split=split[0]) for x in qkv[1:])
        known = running.sites.get(running.at)
        site = _OTHER_SITE if known is None else known.site
        params = AttentionParams(heads, query.shape[3], key.shape[2], options.get("scale"))
        context = running.context
        if site.role is AttentionRole.SELF:
            context = running.context_of(query.shape[1], key.shape[1])
        layer = self._run.layer(site, params, query.dtype, exact=exact)
        self._run.calls += 1
        mask = as_mask(mask, query, key)
        with use_forward_context(context):
            out = layer.attend(query, key, value, mask, scale=options.get("scale"))
        return as_output(out, split=split[1])

    def _decline(self, error: MultimodalGenError) -> None:
        if self.settings.strict:
            raise error
        if self._run is not None:
            reason = str(error)
            self._run.declined[reason] += 1
            if self._run.declined[reason] == 1:
                logger.warning("attention calls run on %s: %s", self.below_name, reason)

    @property
    def below_name(self) -> str:
        """What serves the calls that this one declines."""
        if self.below is None:
            return "ComfyUI's own attention"
        return getattr(self.below, "__qualname__", None) or type(self.below).__name__

    def around_sampling(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Serve a sampling run; a wrapper of ComfyUI around its samplers."""
        guider: Any = getattr(executor, "class_obj", None)
        patcher = getattr(guider, "model_patcher", None)
        sampling = None if patcher is None else patcher.get_model_object("model_sampling")
        run = _Run(self.settings, sampling)
        outer, self._run = self._run, run
        self._depth += 1
        try:
            out = executor(*args, **kwargs)
            self._require_calls(run)
            return out
        finally:
            self._finish(run)
            self._run = outer
            self._depth -= 1

    def around_model(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Serve a call of the denoiser; a wrapper of ComfyUI around its forward."""
        model: Any = getattr(executor, "class_obj", None)
        if not isinstance(model, nn.Module):
            return executor(*args, **kwargs)
        if self._run is None:
            self._run = _Run(self.settings, None)
        family = find_family(model)
        if model not in self._sites:
            self._sites[model] = {
                name: _Site(module, site, untraced_hook(partial(_at, name)))
                for name, (module, site, _) in attention_sites(model, family).items()
            }
        if not self._run.denoiser_calls:
            self._run.enter(model, family)
        call = Call(model=model, arguments=_named(executor, args, kwargs))
        running = _Running(
            owner=self,
            model=model,
            sites=self._sites[model],
            context=_context(call, self._run),
            rows=family.rows(call),
        )
        with _told(running), use_forward_context(running.context):
            return executor(*args, **kwargs)

    def _require_calls(self, run: _Run) -> None:
        """Say so if no attention call of a run came by, as where another node took its place."""
        if run.calls or run.declined or not run.denoiser_calls:
            return
        found = (
            "none of the attention calls of this run reached the node Attention backend: a node "
            "behind it put another function in its place; put that node before it"
        )
        if self.settings.strict:
            raise UsageError(found)
        run.warnings.warn(found)

    def _finish(self, run: _Run) -> None:
        """Keep the report of a run and nothing else."""
        run.end()
        self._last = run.report(self.below_name)
        text = self._last.summary()
        logger.info("attention of this run:\n%s", text)
        if self._tell is not None:
            self._tell(text)

    def clean_up(self, *patcher: object) -> None:
        """End what ran outside of sampling runs; a callback of ComfyUI, made inside of them too."""
        del patcher
        if self._run is not None and not self._depth:
            self._finish(self._run)
            self._run = None

    def report(self) -> AttentionReport:
        """Return what ran in the last sampling run, or in the one that runs."""
        return self._last if self._run is None else self._run.report(self.below_name)

    def plan(self, model: nn.Module, dtype: torch.dtype, sampling: Any) -> AttentionReport:
        """Return what would run in every layer of a denoiser that tells its sizes.

        Args:
            model: the denoiser.
            dtype: what it computes in.
            sampling: what converts shares of the schedule to noise levels, or None.

        Raises:
            UnsupportedBackendError: strict, and a backend cannot serve a layer.
        """
        family = find_family(model)
        run = _Run(self.settings, sampling)
        run.enter(model, family)
        for _, site, params in attention_sites(model, family).values():
            if params is None:
                run.notes[f"{site.name} and others tell their sizes when they run"] = None
                continue
            try:
                run.layer(site, params, dtype)
            except UnsupportedBackendError as error:
                if self.settings.strict:
                    raise
                run.notes[f"{site.name} will run on {self.below_name}: {error}"] = None
        return run.report(self.below_name)


def take_over(model: Any, settings: Settings, tell: Callable[[str], None] | None = None) -> Any:
    """Return a clone of a MODEL whose attention this package's layers do.

    What other nodes put in place of ComfyUI's attention gets the calls that the layers decline. A
    takeover that the model has already is replaced. The model itself stays as it is.

    Args:
        model: a `ModelPatcher`.
        settings: what the node's user chose.
        tell: gets the report of every sampling run as text.
    """
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    below = options.get(_OVERRIDE)
    while isinstance(below, Takeover):
        below = below.below
    takeover = Takeover(settings, below, tell)
    options[_OVERRIDE] = takeover
    for place, wrapper in (
        ("outer_sample", takeover.around_sampling),
        ("diffusion_model", takeover.around_model),
    ):
        clone.remove_wrappers_with_key(place, KEY)
        clone.add_wrapper_with_key(place, KEY, wrapper)
    clone.remove_callbacks_with_key("on_cleanup", KEY)
    clone.add_callback_with_key("on_cleanup", KEY, takeover.clean_up)
    clone.set_attachments(KEY, takeover)
    return clone


def _named(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a model's forward by name."""
    bound = inspect.signature(executor.original).bind_partial(*args, **kwargs)
    named = dict(bound.arguments)
    return {**named, **named.pop("kwargs", {})}


def _context(call: Call, run: _Run) -> DenoiserContext:
    """Return what ComfyUI tells of a call; reads the noise levels, once per call."""
    options: Mapping[str, Any] = call.arguments.get("transformer_options") or {}
    levels, now = options.get("sample_sigmas"), options.get("sigmas")
    sigmas: tuple[float, ...] | None = None
    step, value = 0, None
    if isinstance(levels, torch.Tensor) and isinstance(now, torch.Tensor) and levels.numel() > 1:
        value, *found = torch.cat((now.flatten()[:1].to(levels), levels)).tolist()
        sigmas = tuple(found[:-1])
        # Samplers of order 2 evaluate between two steps: such calls are of the earlier one.
        step = max(sum(sigma >= value * (1 - 1e-4) for sigma in sigmas) - 1, 0)
    branches = tuple(options.get("cond_or_uncond") or ())
    key = (branches, tuple(options.get("uuids") or ()))
    count = run.denoiser_calls[step, key]
    run.denoiser_calls[step, key] += 1
    both = 0 in branches and 1 in branches
    return DenoiserContext(
        current_timestep=step,
        timestep=value,
        num_steps=None if sigmas is None else len(sigmas),
        sigmas=sigmas,
        cfg_branch="both" if both else {0: "cond", 1: "uncond"}.get(next(iter(branches), -1)),
        branch_key=(*key, count),
        component=COMPONENT,
        request_id=run.request_id,
    )


@contextmanager
def _told(running: _Running) -> Iterator[None]:
    """Let the attention modules of a denoiser tell, inside the block, which of them runs."""
    token = _RUNNING.set(running)
    with ExitStack() as undo:
        undo.callback(_RUNNING.reset, token)
        for site in running.sites.values():
            undo.callback(site.module.register_forward_pre_hook(site.enter).remove)
            undo.callback(site.module.register_forward_hook(_leave, always_call=True).remove)
        yield


def _at(name: str, *_: object) -> None:
    running = _RUNNING.get()
    if running is not None:
        running.at = name


# A compiled block may keep a hook that it was traced with: it looks the running call up.
_leave = untraced_hook(partial(_at, _OTHER))
