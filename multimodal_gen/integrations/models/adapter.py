"""What has to be known of a model family: where the latent grid and the text are, and the roles.

T, H, W are the frames, rows and columns of the latent after patching.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from multimodal_gen.integrations.models.split_plan import SplitPlan
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.described_tokens import DescribedTokens
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import TextSpan

Grid: TypeAlias = tuple[int, int, int]

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a model is called with.

    Attributes:
        arguments: arguments by name, positional ones included.
    """

    arguments: Mapping[str, Any]

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return an argument, or None where it is absent or no tensor."""
        value = self.arguments.get(name)
        return value if isinstance(value, torch.Tensor) else None

    def length(self, *names: str) -> int:
        """Return the summed sizes of axis 1 of tensor arguments; absent ones count 0."""
        tensors = (self.tensor(name) for name in names)
        return sum(tensor.shape[1] for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall(Arguments):
    """One call of a model's forward.

    Attributes:
        config: the model's configuration.
        memo: values derived from an argument's contents, kept as long as that tensor lives.
    """

    config: Any
    memo: WeakTensorKeyDictionary

    def once(self, tensor: torch.Tensor, read: Callable[[], _Found]) -> _Found:
        """Return what `read` finds in an argument, looked at again only once it was written to."""
        version = 0 if tensor.is_inference() else tensor._version
        if tensor not in self.memo or self.memo[tensor][0] != version:
            self.memo[tensor] = version, read()
        found: _Found = self.memo[tensor][1]
        return found


def role_by_name(name: str, module: nn.Module) -> AttentionRole:
    """Tell the role from names that are in general use, and else from what diffusers says.

    It calls any attention cross-attention that was given the width of its keys.
    """
    last = name.rpartition(".")[2]
    if last.startswith("self_"):
        return AttentionRole.SELF
    if getattr(module, "is_cross_attention", False) or last == "attn2" or "cross" in last:
        return AttentionRole.CROSS
    return AttentionRole.SELF


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdapter:
    """One model family.

    Attributes:
        classes: names of its diffusers classes.
        role_of: role of an attention module, by its dotted name.
        grid: latent grid of a call, or None when the call does not tell.
        text_span: where text sits in joint sequences, or None when there are none.
        padding: which keys are padding, or None when the call has no padding.
        timestep: the timestep of the tokens on the grid, of a model whose arguments do not name it
            or that has several; None for the largest value of the argument that is named so.
        timestep_scale: factor between the scheduler's timesteps and the model's.
        batches_guidance: its pipelines run both guidance branches in one batch.
        batched: its arguments with a batch axis, if so.
        masks_padding: stock processor classes whose masks tell the padding and nothing else.
        replacements: globals of stock processors to replace, by class name.
        gated: stock processor classes whose replacements hand the gate of a coarse branch on.
        causal_blocks: entry of its configuration that has the frames of a block which sees no later
            one, and for which it makes a mask of all tokens; None where there is none.
        split: how its tokens are split over ranks; the predicate of a sentence that says why they
            cannot be; or None where neither is known.
        repeats_keys: its processors hand keys and values to the attention call as often as queries.
        described: what the user says of its tokens, where that is all there is to go by.
    """

    classes: tuple[str, ...]
    role_of: Callable[[str, nn.Module], AttentionRole] = role_by_name
    grid: Callable[[ModelCall], Grid | None] = lambda call: None
    text_span: Callable[[ModelCall], TextSpan | None] = lambda call: None
    padding: Callable[[ModelCall], KeyPadding | None] = lambda call: None
    timestep: Callable[[ModelCall], torch.Tensor | None] | None = None
    timestep_scale: float = 1.0
    batches_guidance: bool = False
    batched: tuple[str, ...] = ()
    masks_padding: tuple[str, ...] = ()
    replacements: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    gated: tuple[str, ...] = ()
    causal_blocks: str | None = None
    split: SplitPlan | str | None = None
    repeats_keys: bool = False
    described: DescribedTokens | None = None


def adapter_of(described: DescribedTokens) -> ModelAdapter:
    """Return the adapter of a model by what its user says of its tokens."""
    start, stop = described.text or (0, 0)
    span = TextSpan(start=start, length=stop - start) if described.text else None

    return ModelAdapter(
        classes=(),
        grid=lambda call: described.grid,
        text_span=lambda call: span,
        described=described,
    )


def latent_tokens(call: ModelCall) -> int:
    """Return the number of tokens of packed latents, `hidden_states` [B, S, C]."""
    return call.length("hidden_states")


def tokens_of(grid: Callable[[ModelCall], Grid | None]) -> Callable[[ModelCall], int | None]:
    """Return what gives the number of tokens from a grid; `SplitPlan` by itself does since 0.2."""

    def tokens(call: ModelCall) -> int | None:
        sizes = grid(call)
        return None if sizes is None else math.prod(sizes)

    return tokens


def video_grid(
    call: ModelCall, patch: tuple[int, int, int], axes: tuple[int, ...] = (2, 3, 4)
) -> Grid | None:
    """Return the grid of `hidden_states`, cut into patches.

    Args:
        call: a call of the model.
        patch: frames, rows and columns of a patch.
        axes: those of frames, rows and columns in it, or of an image's rows and columns.
    """
    latent = call.tensor("hidden_states")
    if latent is None or latent.dim() != 2 + len(axes):
        return None
    sizes = (*[1] * (3 - len(axes)), *(latent.shape[axis] for axis in axes))
    return (sizes[0] // patch[0], sizes[1] // patch[1], sizes[2] // patch[2])


def patch_of(config: Any) -> tuple[int, int, int]:
    """Return frames, rows and columns of a patch, which configurations say in a few ways."""
    patch = config.patch_size
    if isinstance(patch, int):
        return (getattr(config, "patch_size_t", None) or 1, patch, patch)
    frames, rows, columns = [1] * (3 - len(patch)) + list(patch)
    return (frames, rows, columns)


def grid_along(*axes: int) -> Callable[[ModelCall], Grid | None]:
    """Return `video_grid` for the patches of the model; see there for the axes."""
    return lambda call: video_grid(call, patch_of(call.config), axes)


latents_grid = grid_along(2, 3, 4)
"""The grid of `hidden_states` [B, C, frames, height, width]."""


def image_grid(call: ModelCall, patch: tuple[int, ...] | None = None) -> Grid | None:
    """Return the grid of `hidden_states` [B, C, height, width].

    Args:
        call: a call of the model.
        patch: rows and columns of a patch; those of the model when None.
    """
    rows_and_columns = patch_of(call.config)[1:] if patch is None else patch
    return video_grid(call, (1, rows_and_columns[0], rows_and_columns[1]), (2, 3))


def history_tokens(call: ModelCall, name: str, coarser: int) -> int:
    """Return the tokens of earlier frames, in patches of so many of the grid's on each axis.

    Args:
        call: a call of the model.
        name: of the argument `latents_...` [B, C, frames, height, width]; without its frames'
            `indices_...` the model leaves it out.
        coarser: patches of the grid that one covers on each axis.
    """
    latent = call.tensor(f"latents_{name}")
    if latent is None or call.arguments.get(f"indices_latents_{name}") is None:
        return 0
    sizes = zip(latent.shape[2:], patch_of(call.config), strict=True)
    return math.prod(-(-size // (step * coarser)) for size, step in sizes)


def role_by_prefix(
    prefixes: tuple[str, ...], role: AttentionRole, other: AttentionRole | None = None
) -> Callable[[str, nn.Module], AttentionRole]:
    """Return what tells the role from how names begin.

    Args:
        prefixes: how the names of some modules begin.
        role: their role.
        other: that of all others; None for what `role_by_name` tells.
    """

    def role_of(name: str, module: nn.Module) -> AttentionRole:
        if name.startswith(prefixes):
            return role
        return role_by_name(name, module) if other is None else other

    return role_of


refiner_role = role_by_prefix(("context_embedder.",), AttentionRole.ENCODER)
"""Tells modules of a text refiner from those of the denoiser."""


def masked_text(
    name: str,
    role: AttentionRole = AttentionRole.SELF,
    *,
    grid: Callable[[ModelCall], Grid | None] | None = None,
    after: tuple[str, ...] = (),
    valid_first: bool = False,
) -> Callable[[ModelCall], KeyPadding | None]:
    """Return what tells the padding of text by its mask [B, L]; see `KeyPadding`.

    Args:
        name: the argument that is the mask.
        role: role of the modules that attend to the text.
        grid: finds the grid of the tokens in front of it; None where there are none.
        after: arguments whose tokens are behind it.
        valid_first: the model moves valid text tokens before padded ones.
    """

    def padding(call: ModelCall) -> KeyPadding | None:
        mask, sizes = call.tensor(name), None if grid is None else grid(call)
        if mask is None or mask.dim() != 2 or (grid is not None and sizes is None):
            return None
        before = 0 if sizes is None else math.prod(sizes)
        behind = call.length(*after)
        return KeyPadding(role, mask, before=before, after=behind, valid_first=valid_first)

    return padding


def rear_text(grid: Grid | None, length: int) -> TextSpan | None:
    """Return the span of so many text tokens behind a grid."""
    if grid is None or not length:
        return None
    return TextSpan(start=math.prod(grid), length=length)


def text_behind(
    grid: Callable[[ModelCall], Grid | None], *names: str
) -> Callable[[ModelCall], TextSpan | None]:
    """Return what finds the text of arguments behind the grid."""
    return lambda call: rear_text(grid(call), call.length(*names))


def front(length: int) -> TextSpan | None:
    """Return the span of so many tokens in front of the latent ones."""
    return TextSpan(start=0, length=length) if length else None


def front_text(call: ModelCall) -> TextSpan | None:
    """Return the span of `encoder_hidden_states` in front of the latent tokens."""
    return front(call.length("encoder_hidden_states"))
