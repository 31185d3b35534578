"""What the tiny families share: their record, the text they know, and how weights are drawn.

Under these random weights a tiny model behaves like a trained one: every layer keeps the scale of
its input, so latents neither vanish nor blow up over the steps, and attention is far from uniform,
so a wrong attention output shows in the latents.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import nn

    ModuleT = TypeVar("ModuleT", bound=nn.Module)

DEFAULT_PROMPT: Final = "A red fox runs through fresh snow at sunrise"

SENTENCES: Final[tuple[str, ...]] = (
    DEFAULT_PROMPT,
    "A cat sleeps on a warm stone wall while leaves fall around it.",
    "Two dogs chase a yellow ball along the beach, waves behind them.",
    "The camera moves slowly over a green valley with a river.",
    "A woman in a blue coat walks across a busy street in the rain.",
    "Close view of hands shaping wet clay on a spinning wheel.",
    "An old train crosses a high bridge above the clouds.",
    "City lights at night, seen from a boat on dark water.",
    "A small robot waters flowers in a bright glass house.",
    "Snow falls on a quiet village, smoke rises from the houses.",
    "A man reads a book by the window, soft morning light.",
    "Waves break against black rocks under a stormy sky.",
    "A hot air balloon floats over desert hills at sunset.",
    "Children fly kites in a field of tall grass.",
    "A bowl of fruit on a wooden table, oil painting style.",
    "The astronaut plants a flag on a dusty red planet.",
    'A shop window with a sign that says "open" in large letters.',
    "Time lapse of stars turning above a mountain lake.",
    "A chef cuts vegetables fast, steam and fire in the background.",
    "Blurry, low quality, distorted, static, bad anatomy, worst quality.",
)


# Query and key norms leave logits of unit spread; this gain, squared, sharpens the softmax.
_QK_NORM_GAIN: Final = 1.2
_QK_NORM_NAMES: Final = frozenset({"norm_q", "norm_k", "norm_added_q", "norm_added_k"})
_BIAS_STD: Final = 0.02

# Guidance multiplies the difference of two predictions by about five, rounding errors included;
# this gain on the denoiser's last layer brings both back to the scale of the latents.
_OUTPUT_LAYER: Final = "proj_out"
_OUTPUT_GAIN: Final = 0.25


@contextlib.contextmanager
def seeded(seed: int, component: str) -> Iterator[None]:
    """Draw every random number in the block from `seed` and the component's name alone.

    The state of torch's global generator is put back afterwards, so making a model never shifts
    the random numbers of the caller.

    Args:
        seed: Seed of the whole pipeline.
        component: Name such as "transformer_2"; components of one pipeline get different weights.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        # The CPU generator reads only the low 32 bits of a seed.
        torch.manual_seed(zlib.crc32(f"{component} {seed}".encode()))
        yield


def initialise(model: "ModuleT") -> "ModuleT":
    """Fill linear, convolution and embedding layers with scale-preserving random values, in place.

    Weights get variance 1 / fan_in (less in a denoiser's last layer), embeddings variance 1, biases
    a small spread. Norms keep their ones, except that query and key norms are raised to sharpen
    attention. Parameters that belong to no such layer keep what their constructor drew. Call it
    inside `seeded`.

    Args:
        model: The freshly constructed model.

    Returns:
        The same model, in eval mode.
    """
    import torch
    from torch import nn

    linear_like = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_()
            elif isinstance(module, linear_like):
                gain = _OUTPUT_GAIN if name == _OUTPUT_LAYER else 1.0
                module.weight.normal_(std=gain * module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    module.bias.normal_(std=_BIAS_STD)
            elif name.rpartition(".")[2] in _QK_NORM_NAMES:
                weight = getattr(module, "weight", None)
                if weight is not None:
                    weight.mul_(_QK_NORM_GAIN)
    return model.eval()


Make: TypeAlias = Callable[[], Any]
"""Makes a component, or a part of one."""


def component(class_name: str, **config: Any) -> Make:
    """Return what makes a component of a class of diffusers; the weights of a model are random.

    Args:
        class_name: Name of the class.
        config: Arguments of its constructor.
    """

    def make() -> Any:
        import diffusers
        from torch import nn

        made = getattr(diffusers, class_name)(**config)
        return initialise(made) if isinstance(made, nn.Module) else made

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """What can be made under one family name, and how to run it in a second or two on a CPU.

    Attributes:
        name: Family name, as given to `make_tiny_model`.
        pipeline_class: Name of the diffusers pipeline class.
        output: What the pipeline generates.
        components: What makes each component but those for text, by its name.
        text: What makes each tokenizer, and a text encoder for it, by the end of their names, ""
            or "_2".
        template: The pipeline's attribute with words that its tokenizer has to know, which then
            gets them; "" for none.
        pipeline_config: Further arguments of the pipeline's constructor.
        height: Pixels.
        width: Pixels.
        num_frames: Pixel frames of a video; None for an image.
        num_inference_steps: Denoising steps; None where the pipeline has no such argument.
        guidance_name: The pipeline's argument for classifier-free or distilled guidance; None when
            it has none (HunyuanVideo-1.5 keeps the scale in its `guider` component).
        guidance_scale: Value for that argument.
        latent_grid: Tokens the transformer sees at this size, as (frames, height, width) after
            patching. The three numbers differ wherever there is more than one frame.
        extra_kwargs: Further pipeline arguments, such as a negative prompt that turns guidance on.
        needs_image: Whether the pipeline must be given an image.
    """

    name: str
    pipeline_class: str
    output: Literal["video", "image"]
    components: Mapping[str, Make]
    text: Mapping[str, tuple[Callable[..., Any], Callable[[Any], Any]]]
    template: str = ""
    pipeline_config: Mapping[str, Any] = field(default_factory=dict)
    height: int
    width: int
    num_frames: int | None = None
    num_inference_steps: int | None = 3
    guidance_name: str | None = "guidance_scale"
    guidance_scale: float | None = None
    latent_grid: tuple[int, int, int]
    extra_kwargs: Mapping[str, Any] = field(default_factory=dict)
    needs_image: bool = False

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """A new dict of keyword arguments for one call of the pipeline, the prompt included."""
        kwargs: dict[str, Any] = {
            "prompt": DEFAULT_PROMPT,
            "height": self.height,
            "width": self.width,
        }
        if self.num_inference_steps is not None:
            kwargs["num_inference_steps"] = self.num_inference_steps
        if self.num_frames is not None:
            kwargs["num_frames"] = self.num_frames
        if self.guidance_name is not None and self.guidance_scale is not None:
            kwargs[self.guidance_name] = self.guidance_scale
        return {**kwargs, **self.extra_kwargs}

    def build(self, seed: int) -> Any:
        """Return the pipeline with weights drawn from a seed; imports torch and diffusers."""
        import diffusers

        parts = dict(self.pipeline_config)
        for name, make in self.components.items():
            with seeded(seed, name):
                parts[name] = make()
        pipeline_class = getattr(diffusers, self.pipeline_class)
        if not self.template:
            return pipeline_class(**parts, **self._text_parts(seed))
        names = (f"{part}{end}" for end in self.text for part in ("tokenizer", "text_encoder"))
        pipeline = pipeline_class(**parts, **dict.fromkeys(names))
        pipeline.register_modules(**self._text_parts(seed, getattr(pipeline, self.template)))
        return pipeline

    def _text_parts(self, seed: int, template: str | None = None) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for end, (tokenizer, encoder) in self.text.items():
            takes_template = template is not None and not end
            made = tokenizer(template) if takes_template else tokenizer()
            with seeded(seed, f"text_encoder{end}"):
                parts |= {f"tokenizer{end}": made, f"text_encoder{end}": encoder(made)}
        return parts
