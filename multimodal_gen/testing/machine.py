"""Letting the choice of kernels see another machine than the one that tests run on."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from multimodal_gen.kernels import engine
from multimodal_gen.kernels.block_sparse import api as block_sparse
from multimodal_gen.kernels.cluster_attention import api as cluster_attention
from multimodal_gen.kernels.kmeans import api as kmeans
from multimodal_gen.kernels.quantized_attention import api as quantized_attention

__all__ = ["machine_with"]

_ASKING = (block_sparse, cluster_attention, kmeans, quantized_attention)


@contextmanager
def machine_with(
    packages: Mapping[str, str], place: tuple[str, tuple[int, int] | None] | None = None
) -> Iterator[None]:
    """Let kernels be chosen as where other packages are installed.

    Args:
        packages: distribution -> version; others are not installed.
        place: platform and compute capability that every tensor seems to lie on; None for its own.
    """
    with ExitStack() as stack:
        stack.callback(engine.forget_choices)
        engine.forget_choices()
        stack.enter_context(
            patch.object(engine, "installed", lambda probe: packages.get(probe.distribution))
        )
        stack.enter_context(patch.object(engine, "_interpreted", lambda: False))
        if place is not None:
            for module in _ASKING:
                stack.enter_context(patch.object(module, "place_of", lambda _: place))
        yield
