"""The backends of this package as a plug-in of sglang's diffusion engine.

sglang loads `register` from the entry point group `sglang.multimodal_gen.plugins`, in each of its
processes. It does nothing until a run asks for it:

    sglang generate --model-path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "A red fox" \
      --attention-backend-config '{"multimodal_gen": {"backend": "sage_attn"}}'

Both packages install a command `sglang`, and the one that was installed last is run. Install sglang
last, or again; this package's is `multimodal-gen` too.

With `backend` there may be its parameters, as `multimodal-gen attention describe NAME` lists
them. Layers that sglang builds then run on that backend; what it needs of a layer that this
one cannot do, such as packed sequences, keeps sglang's own. Calls whose tokens are not those of the
latent grid alone run dense under sparse methods, with one warning.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from multimodal_gen.errors import ConfigError, short
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, scope_from
from multimodal_gen.runtime.managers.forward_context import ForwardContext, use_forward_context

_KEY = "multimodal_gen"
_SELECTS = "sglang.multimodal_gen.runtime.layers.attention.selector.get_attn_backend"


def register() -> None:
    """Put the choice of a backend under this package's control, for sglang."""
    from sglang.multimodal_gen.plugins import HookRegistry, HookType

    HookRegistry.register(_SELECTS, _select, HookType.AROUND)


def _select(own: Callable[..., type], *args: Any, **kwargs: Any) -> type:
    """Return the class of backends that a layer of sglang is built with.

    Args:
        own: sglang's own choice.
        *args: what it is asked.
        **kwargs: the same.

    Raises:
        ConfigError: what is asked for is no backend, or a parameter is wrong.
    """
    found = own(*args, **kwargs)
    scope = _asked()
    if scope is None:
        return found
    ours = _backend(found, scope)
    requirements = kwargs.get("requirements")
    if requirements is not None and ours.unsupported_requirements(requirements):
        return found
    return ours


def _asked() -> SelectionScope | None:
    """Return what a run asks for, or None."""
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    config = getattr(get_global_server_args(), "attention_backend_config", None)
    asked = config.get(_KEY) if isinstance(config, Mapping) else None
    if not asked:
        return None
    given = {"backend": asked} if isinstance(asked, str) else asked
    if not isinstance(given, Mapping) or "backend" not in given:
        raise ConfigError(
            f"{_KEY} in attention_backend_config must be a backend, or a mapping with `backend` "
            f"and its parameters, got {short(asked)}"
        )
    parameters = {name: value for name, value in given.items() if name != "backend"}
    return scope_from(
        attention_backend=given["backend"], attention_backend_config=parameters or None
    )


def _backend(found: Any, scope: SelectionScope) -> Any:
    """Return a class of sglang's backends whose layers are this package's.

    Args:
        found: sglang's own choice, whose name and metadata it keeps to.
        scope: what is asked for.
    """
    from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
        AttentionBackend,
        AttentionImpl,
    )

    class Impl(AttentionImpl):  # type: ignore[misc]  # untyped base
        """One layer; its heads may be a rank's share."""

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            softmax_scale: float,
            causal: bool = False,
            num_kv_heads: int | None = None,
            prefix: str = "",
            **extra: Any,
        ) -> None:
            del extra
            sizes = (num_heads, head_size, num_kv_heads, softmax_scale, causal)
            self.layer = AttentionLayer(*sizes, prefix=prefix, scope=scope)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_metadata: Any = None,
            **extra: Any,
        ) -> torch.Tensor:
            """Return attention, [B, Sq, H, Dv]."""
            del attn_metadata
            gate = extra.get("gate_compress")
            call = AttentionCall(query, key, value, gate=gate, some_heads=True)
            return _attend(self.layer, call)

    class Backend(AttentionBackend):  # type: ignore[misc]  # untyped base
        """sglang's choice by name, this package's by what runs."""

        get_enum = staticmethod(found.get_enum)
        get_metadata_cls = staticmethod(found.get_metadata_cls)
        get_builder_cls = staticmethod(found.get_builder_cls)

        @staticmethod
        def get_impl_cls() -> type:
            """Return the class of its layers."""
            return Impl

    return Backend


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(layer: AttentionLayer, call: AttentionCall) -> torch.Tensor:
    """Serve a call with what sglang knows of the denoiser's."""
    grid, step = _running()
    no_grid = "this call of the model tells none"
    if grid is not None and (call.query.shape[1], call.key.shape[1]) != (math.prod(grid),) * 2:
        queries, keys = call.query.shape[1], call.key.shape[1]
        no_grid = f"{grid} has {math.prod(grid)} tokens, some calls {queries} queries, {keys} keys"
        grid = None
    if grid is None:
        call = call._replace(no_grid=no_grid)
    if call.gate is not None and not layer.takes_gate:
        call = call._replace(gate=None)
    with use_forward_context(ForwardContext(current_timestep=step, latent_grid=grid)):
        return layer.attend(call)


def _running() -> tuple[tuple[int, int, int] | None, int]:
    """Return the latent grid and the denoising step of the running call, as far as sglang tells."""
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    try:
        running = get_forward_context()
    except AssertionError:  # encoders run outside of any
        return None, 0
    latent = getattr(getattr(running, "forward_batch", None), "raw_latent_shape", None)
    model = getattr(getattr(get_global_server_args(), "pipeline_config", None), "dit_config", None)
    patch = getattr(model, "patch_size", None)
    if isinstance(patch, int):
        patch = (1, patch, patch)
    step = int(running.current_timestep)
    if latent is None or patch is None or len(latent) != 5 or len(patch) != 3:
        return None, step
    frames, rows, columns = (size // cut for size, cut in zip(latent[2:], patch, strict=True))
    return (int(frames), int(rows), int(columns)), step
