"""Which calls of a denoiser one CUDA graph serves, and why some can have none.

A kind is all that a replay repeats: shapes, strides and dtypes of tensors, arguments that are no
tensors, the latent grid and where text is, how the padding lies, what serves every layer at the
step, and how torch computes. What belongs to the model is looked at before every call instead.
"""

import gc
import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from multimodal_gen.integrations.denoiser_context import DenoiserContext
from multimodal_gen.integrations.hooks import own_method
from multimodal_gen.runtime.generator.cross_attention_cache import ADAPTER_STATE
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import current_watch
from multimodal_gen.runtime.layers.attention.scope import forced_backend

_OWN_DATA = (nn.Parameter, torch.Tensor)
_SPECIAL = ("forward", "processor", "_compiled_call_impl")  # that few modules have
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class CannotCaptureError(Exception):
    """A call runs without a graph; the message says why."""


class ModelFacts:
    """What a graph of a model goes by; taken before every call, so that it is flat and short.

    The modules, which are held, so that no other one takes the identity of one, and their classes;
    where their weights lie, and which of these wrap others, as quantised ones do; their hooks,
    those of step caches included, their processors, and what adapters add how strongly.

    What is not seen: another shape or other strides of a weight that stays where it is and keeps
    its number of elements, as one transposed in place; and a weight or module that only gets
    another name. To look at strides takes a tenth longer, at names a fifth.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        plain = (x for x in model.modules() if not isinstance(x, torch.jit.ScriptModule))
        self._own = [vars(module) for module in plain]
        self._inner = inner = self._own[1:]  # hooks of the model itself run around every call
        self._adapters = [own for own in inner if "scaling" in own or "merged_adapters" in own]
        self._taken = [*self._take()]
        self._held = _tensors(*self._weights())[1]  # for their `id`s

    def hold(self) -> bool:
        """Tell whether the model is what it was."""
        return all(map(operator.eq, self._take(), self._taken))

    def _weights(self) -> tuple[list[Any], list[type]]:
        """Return weights, None where a module goes without, and their types."""
        found = _members(self._own, "_parameters", "_buffers")
        return found, [*map(type, found)]

    # There are thousands of modules and weights: loops of Python over all of them would take longer
    # than a call should. So functions of C read what each of them has, up to the first difference.
    def _take(self) -> Iterator[list[Any]]:
        own, inner = self._own, self._inner
        modules = _members(own, "_modules")
        yield modules
        yield [type(self._model), *map(type, modules)]
        found, types = self._weights()
        yield types
        weights, wrappers = _tensors(found, types)
        yield _places(weights)
        yield [*map(torch.Tensor.numel, weights)]
        yield [*map(id, wrappers)]
        yield _places([part for x in wrappers for part in parts_of(x)])
        yield [*map(itemgetter("training"), own)]
        hooks = _mappings(inner, "_forward_hooks", "_forward_pre_hooks")
        yield [hook for each in filter(None, hooks) for hook in each.values()]
        special = [
            each
            for each in inner
            if "forward" in each or "processor" in each or "_compiled_call_impl" in each
        ]
        yield [*map(id, special)]
        yield [each.get(name) for each in special for name in _SPECIAL]
        processors = [each["processor"] for each in special if "processor" in each]
        yield [repr(each.scale) for each in processors if hasattr(each, "scale")]
        yield [repr(each.get(name)) for each in self._adapters for name in ADAPTER_STATE]


def _mappings(modules: list[dict[str, Any]], *names: str) -> Iterable[dict[str, Any]]:
    """Return the mappings of these names that modules have, which are given by attributes."""
    return itertools.chain(*(map(itemgetter(name), modules) for name in names))


def _members(modules: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return what is in these mappings; of those of a class of their own, that of the class too."""
    return gc.get_referents(*_mappings(modules, *names))  # by one call for all of them


def _tensors(found: list[Any], types: list[type]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors in a list of such types, and those of them that are no plain ones."""
    if {*types} <= {*_OWN_DATA, type(None)}:
        return [x for x in found if x is not None], []
    tensors = [x for x in found if isinstance(x, torch.Tensor)]
    return tensors, [x for x in tensors if type(x) not in _OWN_DATA]


def _places(tensors: list[torch.Tensor]) -> list[int]:
    """Return where tensors lie; 0 for those that do not say."""
    try:
        return [*map(torch.Tensor.data_ptr, tensors)]
    except RuntimeError:
        return [*map(_place, tensors)]


def device_of(model: nn.Module) -> torch.device:
    """Return where the weights of a model are, or the first of them."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold what is in one: itself, or those that it wraps."""
    if type(x) in _OWN_DATA or not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(x, name))]


def _place(x: torch.Tensor) -> int:
    """Return where a tensor lies; 0 where it does not say."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def kind_of_call(
    given: object,
    context: DenoiserContext,
    layers: Iterable[AttentionLayer],
    device: torch.device,
) -> Hashable:
    """Return what calls that one graph serves have in common.

    Args:
        given: the arguments of the call, and the text of its padding.
        context: the call's.
        layers: the attention layers of the denoiser that steps may change.
        device: the denoiser's.

    Raises:
        CannotCaptureError: it is not known what a graph repeats of an argument.
    """
    leaves, form = taken_apart(given)
    padding = context.padding
    return (
        (form, *(_kind_of_argument(each, device) for each in leaves)),
        None if padding is None else padding.kind(),
        (context.latent_grid, context.text_span, context.described, context.no_grid),
        context.cfg_branch == "both",
        tuple(layer.step_kind(context) for layer in layers),
        _how_torch_computes(),
    )


def varying_layers(layers: Iterable[AttentionLayer]) -> list[AttentionLayer]:
    """Return the layers that one thing does not serve in all steps, or a sparse method does."""
    served = ((layer, layer.schedule()) for layer in layers)
    return [x for x, entries in served if len(entries) > 1 or entries[0].primary.method is not None]


def taken_apart(given: object) -> tuple[list[Any], TreeSpec]:
    """Return what is in lists, tuples and mappings, and how; anything else is a whole."""
    return tree_flatten(given, is_leaf=lambda x: type(x) not in (list, tuple, dict))


def _kind_of_argument(value: object, device: torch.device) -> Hashable:
    if isinstance(value, torch.Tensor):
        if type(value) not in _OWN_DATA or value.layout is not torch.strided:
            raise CannotCaptureError(f"an argument is a {type(value).__name__} of its own kind")
        if value.device != device:
            raise CannotCaptureError(f"an argument is on {value.device}, not {device}")
        return (value.shape, value.stride(), value.dtype)
    if type(value) is float:
        return (float, value.hex())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    raise CannotCaptureError(f"an argument is a {type(value).__name__}, whose tensors are unknown")


def require_copyable(out: object) -> None:
    """Refuse what a model returns where it is not known how to copy it."""
    for each in tree_leaves(out):
        if not isinstance(each, (torch.Tensor, *_PLAIN)):
            raise CannotCaptureError(f"it returns a {type(each).__name__}")


def _how_torch_computes() -> Hashable:
    """Return the settings of the process that decide which kernels run."""
    backends: Any = torch.backends
    return (
        forced_backend(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
    )


def reason_of_model(model: nn.Module) -> str | None:
    """Return why no call of a model as it is can be captured, or None."""
    cached = getattr(model, "_cache_config", None) is not None
    if cached or getattr(model, "_is_cached", False):
        return "a step cache is enabled, which decides in every step"
    if "_hf_hook" in vars(model):
        return "it is offloaded by accelerate"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "it is compiled as a whole (compile_repeated_blocks() compiles its blocks)"
    for name, module in model.named_modules():
        if module is not model and (reason := _reason_of_part(module)) is not None:
            return f"{name} {reason}"
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if type(weight) not in _OWN_DATA and not all(
            _place(part) for part in parts_of(weight) if part.numel()
        ):
            return f"{name} is a {type(weight).__name__}, which does not say where it lies"
    devices = {parameter.device for parameter in model.parameters()}
    return "its weights are on several devices" if len(devices) > 1 else None


def _reason_of_part(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, which does not show what it holds"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks, which a replay would not call"
    if has_other_forward(module):
        return "has a forward of its own, as step caches and offloading set"
    return None


def has_other_forward(module: nn.Module) -> bool:
    """Tell whether a module has another forward than its class."""
    forward = vars(module).get("forward")
    return forward is not None and forward != own_method(module, "forward")


def reason_of_call(context: DenoiserContext, device: torch.device) -> str | None:
    """Return why a call as it is made now has no graph, or None."""
    if torch.is_grad_enabled():
        return "gradients may be recorded; call it under torch.no_grad()"
    if torch.is_autocast_enabled(device.type):
        return "autocast keeps copies of weights that no graph may read"
    if current_watch() is not None:
        return "its attention is checked or recorded"
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if modes or _get_current_dispatch_mode_stack():
        return "a mode of torch looks at every operation"
    if context.kv_cache is not None or context.lists is not None:
        return "it works chunk by chunk"
    return None


def reason_of_layers(layers: Iterable[AttentionLayer]) -> str | None:
    """Return why what layers do in one step would not do for another, or None."""
    return next(filter(None, (layer.uncapturable() for layer in layers)), None)
