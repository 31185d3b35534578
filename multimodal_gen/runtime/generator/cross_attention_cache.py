"""`--cache cross_attention`: keys and values of the text are computed once for all steps.

A denoiser gets the same text in every step, so that the layers which see nothing else give the
same again: the text's projection, and those of keys and values in cross-attention. What they gave
is kept and given again, bit for bit. A tensor is known again by its place in memory, which is held,
and by its version, which PyTorch counts up with every write. So are the layer's weights, and of
adapters which are on, merged and how strong: what changes any of them is computed. A write through
`.data`, which PyTorch does not count, is not seen.

Models of Wan's kind put an image and the text into a new tensor in every call. They get one that is
put together once.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multimodal_gen.runtime.generator.overridden import overridden

_KEPT = 4
"""Inputs whose results a layer holds: more than guidance has branches."""
_TEXT = frozenset({"text_embedder", "image_embedder", "caption_projection", "caption_norm"})
# Their `condition_embedder` returns text and image last, and all that they do with the image
# is to put it in front of the text, along the tokens, where it is not None.
_IMAGE_IN_FRONT = frozenset(
    {
        "ChronoEditTransformer3DModel",
        "SkyReelsV2Transformer3DModel",
        "WanAnimateTransformer3DModel",
        "WanTransformer3DModel",
        "WanVACETransformer3DModel",
    }
)
_KEYS_AND_VALUES = (
    "to_k",
    "to_v",
    "to_kv",
    "norm_k",
    "add_k_proj",
    "add_v_proj",
    "norm_added_k",
)


ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""What peft changes in a layer besides its weights."""


class _Kept(NamedTuple):
    """A result, its version, and what it was made of, which is held: no other takes its place."""

    made_of: tuple[object, ...]
    held: tuple[Tensor, ...]
    result: Tensor
    version: int


def _made_of(
    layer: nn.Module, given: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[object, ...]:
    """Return what the result of a layer depends on, so that equal ones have equal results."""
    kind = given[0].device.type
    return (
        *((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x._version) for x in given),
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        *((id(weight), weight._version) for weight in weights),
        *(
            repr(vars(module)[name])
            for module in layer.modules()
            for name in ADAPTER_STATE
            if name in vars(module)
        ),
    )


def layers_of_text(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a denoiser that see its text alone; none where it has no cross-attention.

    Args:
        model: the denoiser.
    """
    found: list[nn.Module] = []
    for path, module in model.named_modules():
        is_cross = getattr(module, "is_cross_attention", path.endswith("attn2"))
        if is_cross is True and not isinstance(module, nn.Sequential):
            layers = (getattr(module, name, None) for name in _KEYS_AND_VALUES)
            found += [layer for layer in layers if isinstance(layer, nn.Module)]
    if not found:
        return
    yield from found
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in _TEXT:
            yield module


def remember(layer: nn.Module, undo: ExitStack, count: Callable[[bool], None]) -> None:
    """Have a layer give again what it gave for the same tensors, until `undo` ends.

    Nothing is kept of calls with gradients, with arguments by name or that are no tensors, or of
    tensors that have no version, as those of `torch.inference_mode`; and no more of a layer whose
    first inputs never came again.

    Args:
        layer: a layer of tensors.
        undo: puts the layer back and lets go of what it held.
        count: is told of every call, and whether it was computed.
    """
    compute = layer.forward
    kept: deque[_Kept] = deque(maxlen=_KEPT)
    came_again: bool | None = None

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal came_again
        known = args and not kwargs and all(isinstance(x, Tensor) for x in args)
        held = (*args, *layer.parameters()) if known else ()
        if not held or torch.is_grad_enabled() or any(each.is_inference() for each in held):
            count(True)
            return compute(*args, **kwargs)
        made_of = _made_of(layer, args, held[len(args) :])
        for each in kept:
            if each.made_of == made_of and each.result._version == each.version:
                came_again = True
                count(False)
                return each.result
        count(True)
        result = compute(*args)
        if len(kept) == _KEPT and came_again is None:
            came_again = False
            kept.clear()
        if isinstance(result, Tensor) and came_again is not False:
            kept.append(_Kept(made_of, held, result, result._version))
        return result

    undo.callback(kept.clear)
    undo.enter_context(overridden(layer, forward=forward))


class _Joined(nn.Module):
    """An image and a text, [B, S, D], in one sequence."""

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return torch.concat((image, text), dim=1)


def join_once(model: nn.Module, undo: ExitStack) -> None:
    """Have a model that puts an image in front of its text get both as one, until `undo` ends.

    It is the same tensor as long as both are, so that layers know it again. Other models are left
    as they are.

    Args:
        model: the denoiser.
        undo: puts it back, and lets go of what is held.
    """
    if type(model).__name__ not in _IMAGE_IN_FRONT:
        return
    joined, embedder = _Joined(), model.get_submodule("condition_embedder")
    remember(joined, undo, lambda computed: None)

    def put_together(module: object, given: object, found: tuple[Any, ...]) -> tuple[Any, ...]:
        *rest, text, image = found
        return found if image is None else (*rest, joined(image, text), None)

    undo.enter_context(embedder.register_forward_hook(put_together))
