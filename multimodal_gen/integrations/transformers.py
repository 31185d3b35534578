"""Text and image encoders of transformers, through its attention interface.

The name `multimodal_gen` is registered with transformers once per process. Only the encoders of
an attached pipeline are set to it, on their configurations, and every attention module that has a
layer of ours carries it as an attribute. A module without one, of another model that shares the
configuration object, runs transformers' own SDPA under that name.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.components import Component, compute_dtype, whole_number
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope

NAME = "multimodal_gen"

_LAYER = "_multimodal_gen_attention"
_IMPLEMENTATION = "_attn_implementation_internal"


class _Name(StandIn, str):
    """`NAME` in a configuration; copied or pickled, it is the name it took the place of."""

    __slots__ = ("earlier",)
    earlier: object

    @classmethod
    def in_place_of(cls, earlier: object) -> "_Name":
        """Return the name, remembering `earlier`."""
        name = cls(NAME)
        name.earlier = earlier
        return name

    def in_copies(self) -> object:
        """Return the name it took the place of."""
        return self.earlier


class EncoderPlan:
    """What `apply` will do to an encoder; making it changes nothing.

    Args:
        component: the encoder.
        scope: what the user configured.

    Attributes:
        model: the model.

    Raises:
        UsageError: the encoder is attached already.
        UnsupportedBackendError: a requested backend cannot serve one of its layers.
    """

    def __init__(self, component: Component, scope: SelectionScope) -> None:
        self._component, self.model = component, component.model
        self._skipped: list[str] = []
        self._modules: list[tuple[nn.Module, ModuleAttention]] = []
        config = getattr(self.model, "config", None)
        if getattr(config, "output_attentions", False):
            self._skipped.append("it returns attention weights, which kernels do not give")
            return
        if any(_changes_scores(module) for module in self.model.modules()):
            self._skipped.append("it caps its scores or adds sinks to them, which kernels do not")
            return
        for path, module in self.model.named_modules():
            if _uses_interface(module):
                self._add(path, module, scope)

    @property
    def layers(self) -> tuple[ModuleAttention, ...]:
        """The layers, in the order of the model's modules."""
        return tuple(layer for _, layer in self._modules)

    def reports(self) -> Iterator[LayerReport]:
        """Yield what ran in every layer."""
        yield from (layer.report() for layer in self.layers)

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the report should know."""
        name, cls = self._component.name, type(self.model).__name__
        for reason in dict.fromkeys(self._skipped):
            yield f"{name}: {cls} left alone, {reason}"

    def install(self, undo: ExitStack) -> None:
        """Carry the plan out; `undo` takes the steps that take it back."""
        if not self._modules:
            return
        _register()
        for module, layer in self._modules:
            setattr(module, _LAYER, layer)
            undo.callback(delattr, module, _LAYER)
        for config in _configs(self.model):
            undo.callback(setattr, config, _IMPLEMENTATION, getattr(config, _IMPLEMENTATION))
            setattr(config, _IMPLEMENTATION, _Name.in_place_of(getattr(config, _IMPLEMENTATION)))

    def _add(self, path: str, module: nn.Module, scope: SelectionScope) -> None:
        name = self._component.name
        if getattr(module, _LAYER, None) is not None:
            raise UsageError(
                f"target must not be attached twice, {name}.{path} already is; call remove() on "
                f"its handle first"
            )
        params = _params_of(module)
        if params is None:
            self._skipped.append(f"{type(module).__name__} does not say its number of heads")
            return
        site = LayerSite(
            name=path.replace("_orig_mod.", ""),
            component=name,
            role=AttentionRole.ENCODER,
            layer=len(self._modules),
        )
        dtype = compute_dtype(module, self.model)
        # Causality may come in the mask instead, or, as in CLIP's text model, with the call.
        unusual = params._replace(causal=not params.causal)
        also = (unusual,) if hasattr(module, "is_causal") else ()
        self._modules.append((module, ModuleAttention(site, params, dtype, scope, also)))


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks its attention functions to.

    Args:
        module: the attention module.
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, D].
        attention_mask: [B, 1, Sq, Sk], bool (True attends) or additive; complete, causality
            included.
        scaling: factor on q k^T.
        dropout: must be 0.
        is_causal: whether causality holds where there is no mask; default: the module's.
        position_bias: [1, H, Sq, Sk] added to the scores.
        **kwargs: what the model passes to every attention function.

    Returns:
        The output [B, Sq, H, D], and None for the weights.

    Raises:
        UsageError: the model asks for something the layers do not do.
    """
    layer = getattr(module, _LAYER, None)
    if layer is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )
        return stock
    _refuse(layer, dropout, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    mask = attention_mask
    if position_bias is not None:
        mask, causal = _biased(position_bias, mask, query, key, causal=causal), False
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = layer.attend(query, key, value, mask, causal=causal, scale=scaling)
    return out.contiguous(), None


def _biased(
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """Return the position bias and the mask as one additive mask [B or 1, H, Sq, Sk]."""
    if causal:
        num_queries, num_keys = query.shape[2], key.shape[2]
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=key.device).tril()
    if mask is None:
        additive = bias
    elif mask.dtype is torch.bool:
        additive = torch.where(mask, bias, torch.finfo(query.dtype).min)
    else:
        additive = bias + mask
    return additive.to(query.dtype)


def _changes_scores(module: nn.Module) -> bool:
    """Whether a module hands its attention function what the layers cannot honour, as Gemma 2."""
    names = ("attn_logit_softcapping", "sinks")
    return any(getattr(module, name, None) is not None for name in names)


def _refuse(layer: ModuleAttention, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise UsageError(
            f"dropout must be 0.0 under apply(), got {dropout} in {layer.site.name}; attention "
            f"kernels apply no dropout, call the encoder's eval()"
        )
    for name in ("softcap", "s_aux", "head_mask", "cache", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            raise UsageError(
                f"{name} must be None under apply(), got one in {layer.site.name}; leave this "
                f"encoder out, it needs an attention function of its own"
            )


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # Without a mask function of the same name transformers would drop padding silently.
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _uses_interface(module: nn.Module) -> bool:
    """Whether a module's forward asks transformers for its attention function."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield every configuration object that the modules of `model` look at, once."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, _IMPLEMENTATION) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _params_of(module: nn.Module) -> AttentionParams | None:
    """Read heads, sizes and scale off an attention module of transformers, or return None."""
    config = getattr(module, "config", None)
    heads = whole_number(module, "n_heads", "num_heads", "num_attention_heads")
    heads = heads or whole_number(config, "num_attention_heads")
    size = whole_number(module, "head_dim", "key_value_proj_dim", "attention_head_size")
    if not heads or not size:
        return None
    scales = (getattr(module, name, None) for name in ("scaling", "scale"))
    return AttentionParams(
        num_heads=heads,
        head_size=size,
        num_kv_heads=heads // (whole_number(module, "num_key_value_groups") or 1),
        scale=next((scale for scale in scales if isinstance(scale, float)), None),
        causal=getattr(module, "is_causal", False) is True,
    )
