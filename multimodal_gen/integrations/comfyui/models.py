"""What has to be known of a model of ComfyUI: where its attention is, and how its tokens lie.

ComfyUI has model classes of its own, whose order of tokens differs from that of diffusers' classes.
T, H, W are the frames, rows and columns of the latent after patching.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from multimodal_gen.integrations.components import whole_number
from multimodal_gen.integrations.models.adapter import Arguments, Grid
from multimodal_gen.integrations.module_attention import AttentionParams
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite

COMPONENT = "diffusion_model"
"""What ComfyUI calls the denoiser, in rules and in reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How the rows of a self-attention call lie: some in front, the latent grid, some behind.

    Rows in front and behind, such as text and reference images, are attended to by all.

    Attributes:
        grid: (T, H, W).
        front: rows in front; None for as many as there are, where the grid comes last.
        behind: rows behind.
    """

    grid: Grid
    front: int | None = 0
    behind: int = 0

    def __str__(self) -> str:
        front = "any" if self.front is None else self.front
        return f"{front} rows, the latent grid {self.grid}, {self.behind} rows"

    def front_of(self, num_rows: int) -> int | None:
        """Return how many rows of a call are in front, or None where it has other rows."""
        spare = num_rows - math.prod(self.grid) - self.behind
        front = spare if self.front is None else self.front
        return front if front == spare and front >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Arguments):
    """One call of a denoiser; the arguments are those of `**kwargs` too.

    Attributes:
        model: the denoiser.
    """

    model: Any

    def latent(self, dims: int) -> torch.Tensor | None:
        """Return the latent, the first one of those that a model gets, or None for other shapes."""
        x = self.arguments.get("x")
        if isinstance(x, (list, tuple)) and x:
            x = x[0]
        return x if isinstance(x, torch.Tensor) and x.dim() == dims else None

    def tensors(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the tensors of an argument that is a list of them, or nothing."""
        return tuple(x for x in self.arguments.get(name) or () if isinstance(x, torch.Tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture.

    Attributes:
        classes: names of their classes; derived ones count too.
        modules: (pattern of a module's name, its role), the first match counts. Every attention
            call belongs to the module that runs, so no two of them lie in each other.
        rows: how the rows of self-attention lie in a call, or None where that does not tell.
    """

    classes: tuple[str, ...]
    modules: tuple[tuple[str, AttentionRole], ...]
    rows: Callable[[Call], Rows | None]


def _patched(x: torch.Tensor, patch: Sequence[int]) -> Grid:
    """Return the grid of a latent whose last axes are cut into patches, padded to whole ones."""
    sizes = [-(-size // cut) for size, cut in zip(x.shape[-len(patch) :], patch, strict=True)]
    frames, rows, columns = [1] * (3 - len(sizes)) + sizes
    return (frames, rows, columns)


def _count(latents: Sequence[torch.Tensor], patch: Sequence[int]) -> int:
    return sum(math.prod(_patched(x, patch)) for x in latents)


def _wan(call: Call) -> Rows | None:
    """Wan: the video, tokens of a whole reference image in front, of context latents behind."""
    x, patch = call.latent(5), call.model.patch_size
    if x is None:
        return None
    frames, rows, columns = _patched(x, patch)
    more = call.tensor("time_dim_concat")
    frames += 0 if more is None else _patched(more, patch)[0]
    reference = call.tensor("reference_latent")
    front = 0
    if reference is not None and getattr(call.model, "ref_conv", None) is not None:
        front = (reference.shape[-2] // patch[1]) * (reference.shape[-1] // patch[2])
    return Rows(
        grid=(frames, rows, columns),
        front=front,
        behind=_count(call.tensors("context_latents"), patch),
    )


def _between_text_and_references(dims: int) -> Callable[[Call], Rows | None]:
    """Flux, FLUX.2 and Qwen-Image: text, the image or its layers, reference images."""

    def rows(call: Call) -> Rows | None:
        x, patch = call.latent(dims), [1] * (dims - 4) + [call.model.patch_size] * 2
        if x is None:
            return None
        behind = _count(call.tensors("ref_latents"), patch)
        return Rows(grid=_patched(x, patch), front=call.length("context"), behind=behind)

    return rows


def _hunyuan(call: Call) -> Rows | None:
    """HunyuanVideo and HunyuanImage: what the text encoders say, a reference image, the video."""
    patch = tuple(call.model.patch_size)
    x = call.latent(2 + len(patch))
    if x is None:
        return None
    reference = call.tensor("ref_latent")
    text = call.length("context", "clip_fea")
    if getattr(call.model, "byt5_in", None) is not None:
        text += call.length("txt_byt5")
    front = text + (0 if reference is None else _count((reference,), patch))
    return Rows(grid=_patched(x, patch), front=front)


def _ltx(call: Call) -> Rows | None:
    """LTX-Video and the video of LTX-2: the video, frames to go by behind it."""
    x = call.latent(5)
    if x is None:
        return None
    frames, rows, columns = x.shape[2:]
    keyframes = call.tensor("keyframe_idxs")
    guides = 0 if keyframes is None else keyframes.shape[2]
    if guides % (rows * columns) or guides >= frames * rows * columns:
        return None
    return Rows(grid=(frames - guides // (rows * columns), rows, columns), behind=guides)


def _minimax_h3(call: Call) -> Rows | None:
    """MiniMax-H3: text, conditions and audio in one sequence, the video last."""
    x = call.latent(5)
    return None if x is None else Rows(grid=_patched(x, call.model.patch_size), front=None)


_SELF, _CROSS, _ENCODER = AttentionRole.SELF, AttentionRole.CROSS, AttentionRole.ENCODER

FAMILIES = (
    Family(
        classes=("WanModel",),
        modules=(
            (r"(vace_)?blocks\.\d+\.self_attn", _SELF),
            (r"(vace_)?blocks\.\d+\.cross_attn", _CROSS),
        ),
        rows=_wan,
    ),
    Family(
        classes=("HunyuanVideo",),
        modules=(
            (r"(double|single)_blocks\.\d+", _SELF),
            (r"txt_in\.individual_token_refiner\.blocks\.\d+", _ENCODER),
        ),
        rows=_hunyuan,
    ),
    Family(
        classes=("LTXVModel",),
        modules=(
            (r"transformer_blocks\.\d+\.attn1", _SELF),
            (r"transformer_blocks\.\d+\.audio_attn1", _ENCODER),
            (r"transformer_blocks\.\d+\.\w*attn2?", _CROSS),
        ),
        rows=_ltx,
    ),
    Family(
        classes=("Flux",),
        modules=((r"(double|single)_blocks\.\d+", _SELF),),
        rows=_between_text_and_references(dims=4),
    ),
    Family(
        classes=("QwenImageTransformer2DModel",),
        modules=((r"transformer_blocks\.\d+\.attn", _SELF),),
        rows=_between_text_and_references(dims=5),
    ),
    Family(
        classes=("MiniMaxH3Model",),
        modules=(
            (r"blocks\.\d+\.attn", _SELF),
            (r"token_refiner\.blocks\.\d+\.attn", _ENCODER),
        ),
        rows=_minimax_h3,
    ),
)
"""The families whose rows are known."""

UNKNOWN = Family(
    classes=(),
    modules=(
        (r"(.*\.)?(attn2|cross_attn|cross_attention)", _CROSS),
        (r"(.*\.)?(attn1?|self_attn|self_attention|attention)", _SELF),
    ),
    rows=lambda call: None,
)
"""What is assumed of all other models: attention modules have the names they have in most."""


def find_family(model: nn.Module) -> Family:
    """Return the family of a model's class or of the nearest class it derives from."""
    for cls in type(model).__mro__:
        for family in FAMILIES:
            if cls.__name__ in family.classes:
                return family
    return UNKNOWN


def attention_sites(
    model: nn.Module, family: Family
) -> dict[str, tuple[nn.Module, LayerSite, AttentionParams | None]]:
    """Return the attention modules of a model by name: where each is, and its sizes if it tells."""
    found = [
        (name, module, role)
        for name, module in model.named_modules()
        if (role := _role(name, family)) is not None
    ]
    counts = {role: sum(role is other for *_, other in found) for role in AttentionRole}
    numbers = {role: iter(range(counts[role])) for role in AttentionRole}
    return {
        name: (
            module,
            LayerSite(
                name=name,
                component=COMPONENT,
                role=role,
                layer=next(numbers[role]),
                num_layers=counts[role],
            ),
            _sizes(module) or _sizes(model),
        )
        for name, module, role in found
    }


def _role(name: str, family: Family) -> AttentionRole | None:
    return next((role for pattern, role in family.modules if re.fullmatch(pattern, name)), None)


def _sizes(module: nn.Module) -> AttentionParams | None:
    """Read heads and channels off a module of ComfyUI, which names them in a few ways."""
    heads = whole_number(module, "num_heads", "heads")
    size = whole_number(module, "head_dim", "dim_head")
    width = whole_number(module, "inner_dim", "hidden_size", "dim")
    if heads and not size and width:
        size = width // heads
    return AttentionParams(heads, size, heads) if heads and size else None
