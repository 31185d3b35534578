"""Random weights under which a tiny model behaves like a trained one.

Every layer keeps the scale of its input, so latents neither vanish nor blow up over the steps, and
attention is far from uniform, so a wrong attention output shows in the latents.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from torch import nn

    ModuleT = TypeVar("ModuleT", bound=nn.Module)

__all__ = ["initialise", "seeded"]

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
