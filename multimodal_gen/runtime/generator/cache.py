"""Caches over denoising steps by name: `first_block:threshold=0.1`.

`cross_attention` is exact and our own; the others are diffusers'. Of these a cache is a
configuration class, whose fields are the keys. What only code can give, as callbacks, is given
here.
"""

import dataclasses
import functools
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from multimodal_gen.errors import ConfigError, UsageError, nearest, short
from multimodal_gen.files import MalformedError
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator.cross_attention_cache import (
    join_once,
    layers_of_text,
    remember,
)
from multimodal_gen.runtime.generator.library_errors import told
from multimodal_gen.settings import MismatchError, Parameter, text_as_mapping

CACHES = MappingProxyType(
    {
        "first_block": "FirstBlockCacheConfig",
        "mag": "MagCacheConfig",
        "taylorseer": "TaylorSeerCacheConfig",
        "pyramid": "PyramidAttentionBroadcastConfig",
        "faster": "FasterCacheConfig",
        "sea": "SeaCacheConfig",
        "text_kv": "TextKVCacheConfig",
    }
)
"""diffusers' caches by their names here, and the classes that configure them."""
CROSS_ATTENTION = "cross_attention"
CACHE_NAMES = (*CACHES, CROSS_ATTENTION)

_TIMESTEP = "current_timestep_callback"
_STEPS = "num_inference_steps"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A cache that was asked for.

    Attributes:
        name: one of `CACHE_NAMES`.
        text: as it was asked for.
        parameters: fields of its configuration, in their types.
    """

    name: str
    text: str
    parameters: Mapping[str, Any]

    def config(self, pipe: Any, num_steps: int | None) -> Any:
        """Return a configuration of diffusers for one model of a pipeline.

        Args:
            pipe: the pipeline, which tells its timestep.
            num_steps: denoising steps of the run, where the cache is to know and was not told.

        Raises:
            UsageError: diffusers refuses the parameters.
        """
        cls, given = _config_class(self.name), dict(self.parameters)
        fields = {field.name for field in dataclasses.fields(cls)}
        if _TIMESTEP in fields:
            given[_TIMESTEP] = lambda: int(pipe._current_timestep)
        if _STEPS in fields and num_steps is not None:
            given.setdefault(_STEPS, num_steps)
        with told(
            lambda e: f"cache {self.text} is refused by diffusers: {' '.join(str(e).split())}"
        ):
            return cls(**given)


def read_cache(text: str, *, name: str = "--cache") -> Cache:
    """Return the cache that a text names, as `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.

    Args:
        text: the text; behind the colon may be a JSON object too.
        name: what messages call it.

    Raises:
        ConfigError: there is no such cache or key, or a value is of the wrong type.
    """
    given, _, rest = text.strip().partition(":")
    cache = given.strip().lower().replace("-", "_")
    if cache not in CACHE_NAMES:
        raise ConfigError(
            f"{name} must be one of {', '.join(CACHE_NAMES)}, got {short(given.strip())}"
            f"{nearest(cache, CACHE_NAMES)}"
        )
    try:
        values = text_as_mapping(rest)
    except MalformedError as error:
        raise ConfigError(f"{name} {cache} must have parameters as k=v,k=v; {error}") from None
    parameters = _parameters(cache, values, name)
    return Cache(name=cache, text=text.strip(), parameters=MappingProxyType(parameters))


def _parameters(cache: str, values: Mapping[object, object], name: str) -> dict[str, Any]:
    cls = _config_class(cache)
    hints = get_type_hints(cls)
    keys = [
        field.name
        for field in dataclasses.fields(cls)
        if not field.name.startswith("_") and "Callable" not in str(hints[field.name])
    ]
    found = {}
    for key, value in values.items():
        if key not in keys:
            valid = f"have keys among {', '.join(keys)}" if keys else "have no keys"
            raise ConfigError(
                f"{name} {cache} must {valid}, got {short(key)}{nearest(str(key), keys)}"
            )
        parameter = Parameter(name=str(key), annotation=_plain_hint(hints[str(key)]), default=None)
        found[str(key)] = parameter.convert(value, f"{name} {cache}")
        if str(key).endswith("threshold") and isinstance(value, (int, float)) and value < 0:
            raise ConfigError(f"`{key}` of {name} {cache} must be 0 or more, got {short(value)}")
    return found


@dataclasses.dataclass(frozen=True)
class _NoParameters:
    """The configuration of a cache that has none."""


def _config_class(cache: str) -> Any:
    if cache == CROSS_ATTENTION:
        return _NoParameters
    from diffusers import hooks

    return getattr(hooks, CACHES[cache])


def _plain_hint(hint: Any) -> Any:
    """Return the type of a field without what no text gives."""
    import torch

    if get_origin(hint) in (Union, UnionType):
        members = (_plain_hint(each) for each in get_args(hint) if each is not torch.Tensor)
        return Union[tuple(members)]  # noqa: UP007 - of a tuple
    return _Dtype if hint is torch.dtype else hint


class _Dtype:
    """A dtype of torch, by its name."""

    expected: ClassVar[str] = "a dtype such as float32"

    @classmethod
    def parse(cls, value: object, *, name: str) -> Any:
        import torch

        del name
        text = value.removeprefix("torch.") if isinstance(value, str) else ""
        dtype = getattr(torch, text, None)
        if not isinstance(dtype, torch.dtype):
            raise MismatchError
        return dtype


class Skipped:
    """How often modules with a cache were called, and how often they computed.

    Args:
        text: the cache, as it was asked for.
    """

    def __init__(self, text: str) -> None:
        self.text, self.calls, self.computed = text, 0, 0

    def note(self) -> str:
        """Return what the cache skipped, in a sentence."""
        if not self.calls:
            return f"the cache {self.text} was enabled"
        share = 1 - self.computed / self.calls
        return f"the cache {self.text} skipped {share:.0%} of {self.calls} calls that it watched"

    def watch(self, module: Any, hooks: Iterable[str], undo: ExitStack) -> None:
        """Count the calls of a module, and those of them that some of diffusers' hooks compute."""
        if getattr(module, "_compiled_call_impl", None) is not None:
            return  # a number that changes would compile the block anew in every step
        for hook in hooks:
            reference = module._diffusers_hook.hooks[hook].fn_ref
            compute = reference.original_forward
            if compute is None:
                continue

            def counted(*args: Any, compute: Any = compute, **kwargs: Any) -> Any:
                self.computed += 1
                return compute(*args, **kwargs)

            reference.original_forward = functools.update_wrapper(counted, compute)
            undo.callback(setattr, reference, "original_forward", compute)
            undo.enter_context(module.register_forward_pre_hook(self._called))

    def count(self, computed: bool) -> None:
        """Note a call, and whether it was computed."""
        self.calls += 1
        self.computed += computed

    def _called(self, *call: Any) -> None:
        self.calls += 1


_LEAF = "group_offloading"  # diffusers' hook in a layer that is offloaded by itself
_HALVES = "faster_cache.py"  # of diffusers, which takes half of a batch for a branch of guidance


@contextmanager
def cached(
    pipe: Any, models: Mapping[str, Any], cache: Cache | None, num_steps: int | None
) -> Iterator[Skipped | None]:
    """Enable a cache on the denoisers of a pipeline in the `with` block.

    Args:
        pipe: the pipeline.
        models: its denoisers, by name.
        cache: the cache; None for none.
        num_steps: denoising steps of the run, or None when unknown.

    Yields:
        What counts the calls that are skipped; None without a cache.

    Raises:
        UsageError: a denoiser has no place for the cache or one enabled already, or the pipeline
            does not tell what the cache wants to know.
    """
    if cache is None:
        yield None
        return
    groups = parallel_groups()
    if cache.name == "faster" and groups is not None and groups.mesh.cfg > 1:
        raise UsageError(
            f"cache {cache.text} must not be used under --cfg-parallel: it drops the unconditional "
            f"half of a batch, which other GPUs have; choose another one"
        )
    skipped = Skipped(cache.text)
    with ExitStack() as undo, told(partial(_misfit, type(pipe).__name__, cache)):
        for name, model in models.items():
            if cache.name == CROSS_ATTENTION:
                _remember_text(name, model, skipped, undo)
                continue
            _enable(pipe, name, model, cache, num_steps, skipped, undo)
        yield skipped


def _remember_text(name: str, model: Any, skipped: Skipped, undo: ExitStack) -> None:
    layers = list(layers_of_text(model))
    if not layers:
        raise UsageError(
            f"cache {CROSS_ATTENTION} must be used with a model that has cross-attention to its "
            f"text, got {name} ({type(model).__name__}), which has none; leave it out"
        )
    if any(hook == _LEAF for layer in layers for _, hook in _hooks_of(layer)):
        raise UsageError(
            f"cache {CROSS_ATTENTION} must not be given with --offload leaf, which loads the next "
            f"layer in each one, also in those that the cache leaves out, got {name} "
            f"({type(model).__name__}) with it; use --offload block"
        )
    for layer in layers:
        remember(layer, undo, skipped.count)
    join_once(model, undo)


def _misfit(pipeline: str, cache: Cache, error: Exception) -> str:
    """Return what an error in the run says of a pipeline that a cache does not fit; or ""."""
    if isinstance(error, ValueError) and "cache context" in str(error):
        return (
            f"cache {cache.text} must be used with a pipeline that names its calls of the "
            f"denoiser, got {pipeline}, which does not; leave it out"
        )
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, IndexError) and raised_in.endswith(_HALVES):
        return (
            f"cache {cache.text} must be used with a pipeline that has both branches of guidance "
            f"in one batch, got {pipeline}, which calls its denoiser with one of them; choose "
            f"another one"
        )
    return ""


def _enable(
    pipe: Any,
    name: str,
    model: Any,
    cache: Cache,
    num_steps: int | None,
    skipped: Skipped,
    undo: ExitStack,
) -> None:
    """Enable a cache on a denoiser until `undo` ends, or leave it as it was found."""
    unfit = f"cache {cache.text} must be used with a model that has a place for it, got {name} ("
    unfit += f"{type(model).__name__})"
    config = cache.config(pipe, num_steps)
    if not hasattr(model, "enable_cache"):
        raise UsageError(f"{unfit}, which has none for any cache of diffusers")
    needs_timestep = any(field.name == _TIMESTEP for field in dataclasses.fields(config))
    if needs_timestep and not hasattr(type(pipe), "current_timestep"):
        raise UsageError(
            f"cache {cache.text} must be used with a pipeline that tells its timestep, got "
            f"{type(pipe).__name__}"
        )
    before = _hooks_of(model)
    undo.callback(_remove_hooks, model, before)
    with told(lambda error: f"{unfit}: {' '.join(str(error).split())}"):
        model.enable_cache(config)
    undo.callback(model.disable_cache)
    added = _hooks_of(model) - before
    if all(not path for path, _ in added):
        raise UsageError(f"{unfit}: none of its modules is one that this cache looks for")
    modules = dict(model.named_modules())
    for path in sorted({path for path, _ in added}):
        hooks = [hook for where, hook in added if where == path]
        skipped.watch(modules[path], hooks, undo)


def _hooks_of(model: Any) -> set[tuple[str, str]]:
    """Return diffusers' hooks in a model, as (path of the module, name of the hook)."""
    return {
        (path, hook)
        for path, module in model.named_modules()
        if hasattr(module, "_diffusers_hook")
        for hook in module._diffusers_hook.hooks
    }


def _remove_hooks(model: Any, before: set[tuple[str, str]]) -> None:
    """Remove the hooks that were not there before."""
    modules = dict(model.named_modules())
    for path, hook in _hooks_of(model) - before:
        modules[path]._diffusers_hook.remove_hook(hook, recurse=False)
