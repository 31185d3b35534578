"""Methods with a trained projection per layer: output = branch + projection(other branch).

The projection belongs to a checkpoint, so it is not a parameter of the layer: whoever has read it
hands it over, before or after the first call, and may move it between devices later.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer

__all__ = ["ProjectedImpl", "ProjectionSlot", "set_projection", "takes_projection"]


class ProjectionSlot:
    """Where a layer keeps its projection, for all its implementations.

    Attributes:
        linear: [D, D], the same for all heads; None for zero.
    """

    __slots__ = ("linear",)

    def __init__(self) -> None:
        self.linear: nn.Linear | None = None

    def fill(self, linear: nn.Linear | None, head_size: int) -> None:
        """Set the projection; None for zero.

        Raises:
            UsageError: it does not map the channels of a head to themselves.
        """
        if linear is not None and tuple(linear.weight.shape) != (head_size, head_size):
            raise UsageError(
                f"`linear` must map {head_size} channels to {head_size}, those of a head, got a "
                f"weight of {list(linear.weight.shape)}"
            )
        self.linear = linear


class ProjectedImpl(AttentionImpl):
    """An implementation with a branch that goes through the projection of its layer.

    Attributes:
        slot: the layer's, which the layer sets; empty where there is no layer.
    """

    slot: ProjectionSlot = ProjectionSlot()


def set_projection(layer: "AttentionLayer", linear: nn.Linear | None) -> None:
    """Give a layer its trained projection, which methods without one leave alone.

    `apply` does it for stock models; a model of one's own does it for layers it has built.

    Args:
        layer: the layer; it does not make `linear` part of its parameters.
        linear: maps the channels of a head to themselves, the same for all heads; None for zero.

    Raises:
        UsageError: it has another size.
    """
    layer.geometry.projection.fill(linear, layer.head_size)


def takes_projection(backends: Iterable[AttentionBackendEnum]) -> bool:
    """Whether one of `backends` has a branch that a projection weighs."""
    platform = current_platform().name
    classes = (find_backend(name, platform).get_impl_cls() for name in backends)
    return any(issubclass(cls, ProjectedImpl) for cls in classes)
