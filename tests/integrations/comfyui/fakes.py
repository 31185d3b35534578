"""Stand-ins with the interface of ComfyUI that the node uses, which record what is done to them."""

import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

KEYS = "optimized_attention_override"


class Sampling:
    """Flow matching without a shift."""

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


class Patcher:
    """A MODEL."""

    def __init__(self, model: nn.Module) -> None:
        self.model = SimpleNamespace(
            diffusion_model=model,
            model_sampling=Sampling(),
            get_dtype_inference=torch.get_default_dtype,
        )
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Callable[..., Any]]]] = {}
        self.callbacks: dict[str, dict[str, list[Callable[..., Any]]]] = {}
        self.attachments: dict[str, Any] = {}

    def clone(self) -> "Patcher":
        other = Patcher(self.model.diffusion_model)
        other.model_options = {k: dict(v) for k, v in self.model_options.items()}
        for name in ("wrappers", "callbacks"):
            found = {
                k: {key: list(x) for key, x in v.items()} for k, v in getattr(self, name).items()
            }
            setattr(other, name, found)
        other.attachments = dict(self.attachments)
        return other

    def get_model_object(self, name: str) -> Any:
        return getattr(self.model, name)

    def add_wrapper_with_key(self, place: str, key: str, wrapper: Callable[..., Any]) -> None:
        self.wrappers.setdefault(place, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, place: str, key: str) -> None:
        self.wrappers.get(place, {}).pop(key, None)

    def add_callback_with_key(self, place: str, key: str, callback: Callable[..., Any]) -> None:
        self.callbacks.setdefault(place, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, place: str, key: str) -> None:
        self.callbacks.get(place, {}).pop(key, None)

    def set_attachments(self, key: str, attachment: Any) -> None:
        self.attachments[key] = attachment

    def get_attachment(self, key: str) -> Any:
        return self.attachments.get(key)


class Executor:
    """What a wrapper gets: calls the next one, or the function itself."""

    def __init__(self, original: Callable[..., Any], class_obj: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = original, class_obj, wrappers

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        behind = Executor(self.original, self.class_obj, self.wrappers[1:])
        return self.wrappers[0](behind, *args, **kwargs)

    __call__ = execute


def own_attention(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kw):
    """ComfyUI's own attention."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dim() < 4:
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
    out = scaled_dot_product_attention(q, k, v, mask, scale=kw.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def optimized_attention(*args: Any, transformer_options: dict[str, Any], **kwargs: Any) -> Any:
    """What models call: the override where there is one."""
    kwargs |= {"transformer_options": transformer_options, "_inside_attn_wrapper": True}
    if KEYS in transformer_options:
        return transformer_options[KEYS](own_attention, *args, **kwargs)
    return own_attention(*args, **kwargs)


class _Attention(nn.Module):
    """Attention of two heads; with `split`, they are split before the call."""

    num_heads = 2

    def __init__(self, head_dim: int, *, split: bool) -> None:
        super().__init__()
        self.head_dim, self.split = head_dim, split
        self.qkv = nn.Linear(2 * head_dim, 6 * head_dim)

    def forward(self, x, context=None, transformer_options=None, **kwargs):
        q, k, v = self.qkv(x).chunk(3, -1)
        if context is not None:
            _, k, v = self.qkv(context).chunk(3, -1)
        if self.split:
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v))
            kwargs["skip_reshape"] = True
        return optimized_attention(q, k, v, 2, transformer_options=transformer_options, **kwargs)


class _Block(nn.Module):
    def __init__(self, head_dim: int, *, split: bool) -> None:
        super().__init__()
        self.self_attn = _Attention(head_dim, split=split)
        self.cross_attn = _Attention(head_dim, split=split)

    def forward(self, x, context, options, **kwargs):
        x = x + self.self_attn(x, transformer_options=options)
        return x + self.cross_attn(x, context, transformer_options=options, **kwargs)


class _Denoiser(nn.Module):
    """A model with the names and the order of tokens of ComfyUI's WanModel."""

    patch_size = (1, 2, 2)

    def __init__(self, head_dim: int = 16, *, split: bool = False) -> None:
        super().__init__()
        self.cross: dict[str, Any] = {}
        self.embed = nn.Conv3d(4, 2 * head_dim, self.patch_size, self.patch_size)
        self.blocks = nn.ModuleList([_Block(head_dim, split=split) for _ in range(2)])

    def forward(self, x, timestep, context, options, **kwargs):
        wrappers = options.get("wrappers", {}).get("diffusion_model", {})
        listed = [wrapper for found in wrappers.values() for wrapper in found]
        executor = Executor(self._forward, self, listed)
        return executor.execute(x, timestep, context, transformer_options=options, **kwargs)

    def _forward(self, x, timestep, context, transformer_options={}, **kwargs):  # noqa: B006
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        if "extra" in kwargs:
            tokens = torch.cat((kwargs["extra"], tokens), 1)
        for block in self.blocks:
            tokens = block(tokens, context, transformer_options, **self.cross)
        return tokens


class WanModel(_Denoiser):
    """One whose rows are known."""


class NewModel(_Denoiser):
    """One that nobody has heard of."""


def sample(patched: Patcher, x: torch.Tensor, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Call the denoiser in three steps, as samplers do, and return its outputs, stacked."""
    levels = torch.tensor([1.0, 0.75, 0.25, 0.0])
    outputs = []

    def run():
        for sigma in levels[:-1]:
            options = {
                **patched.model_options["transformer_options"],
                "wrappers": patched.wrappers,
                "sigmas": sigma[None],
                "sample_sigmas": levels,
                "cond_or_uncond": [0],
            }
            model = patched.model.diffusion_model
            outputs.append(model(x, sigma[None], context, options, **kwargs))
        for callback in patched.callbacks.get("on_cleanup", {}).values():
            callback[0](patched)
        return torch.stack(outputs)

    found = patched.wrappers.get("outer_sample", {}).values()
    guider = SimpleNamespace(model_patcher=patched)
    return Executor(run, guider, [wrapper for listed in found for wrapper in listed]).execute()


class _Input:
    @classmethod
    def Input(cls, id, **given):  # noqa: N802
        return SimpleNamespace(id=id, kind=cls.__name__, **given)

    @classmethod
    def Output(cls, **given):  # noqa: N802
        return SimpleNamespace(kind=cls.__name__, **given)


def _schema(
    *,
    node_id: str,
    display_name: str,
    category: str,
    inputs: list[Any],
    outputs: list[Any],
    description: str,
    hidden: list[Any] | None = None,
    is_output_node: bool = False,
    not_idempotent: bool = False,
) -> SimpleNamespace:
    """Return a schema, of those arguments that releases before 0.9 take."""
    return SimpleNamespace(**locals())


def comfy_api() -> Any:
    """Return a patch of `sys.modules` that has what the nodes import of ComfyUI."""
    kinds = ("Model", "Combo", "String", "Float", "Int", "Boolean", "AnyType")
    io = SimpleNamespace(
        **{name: type(name, (_Input,), {}) for name in kinds},
        ComfyNode=type("ComfyNode", (), {"hidden": SimpleNamespace(unique_id="7")}),
        Schema=_schema,
        NodeOutput=lambda *args, **given: SimpleNamespace(args=args, **given),
        Hidden=SimpleNamespace(unique_id="UNIQUE_ID"),
    )
    latest: Any = types.ModuleType("comfy_api.latest")
    latest.io, latest.ComfyExtension = io, type("ComfyExtension", (), {})
    latest.ui = SimpleNamespace(PreviewText=lambda text: {"text": (text,)})
    server: Any = types.ModuleType("server")
    sent: list[tuple[str, str]] = []
    instance = SimpleNamespace(send_progress_text=lambda *args: sent.append(args))
    server.PromptServer = SimpleNamespace(instance=instance, sent=sent)
    modules = {
        "comfy_api": types.ModuleType("comfy_api"),
        "comfy_api.latest": latest,
        "server": server,
    }
    return patch.dict(sys.modules, modules)
