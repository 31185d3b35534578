"""PISA: the best blocks exactly, all others by their means and a first-order term.

Blocks of 64 tokens attend exactly to the blocks whose means score best (arXiv:2602.01077). Every
other block counts by the mean of its keys and values; how values follow keys inside of blocks is
one matrix per head. Text is attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

from dataclasses import dataclass

from multimodal_gen.runtime.layers.attention.config import (
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    option,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import (
    Budget,
    Cut,
    Limits,
    Router,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PisaConfig(SparseConfig):
    """Parameters of `pisa_attn`.

    Attributes:
        density: share of the blocks of keys that is exact, rounded down to at least one block. It
            may change over the steps: {0: 0.3, 0.4: 0.1}.
        first_order: whether values follow keys inside of blocks; without, blocks count by their
            means alone.
        tail: `pooled` as the paper has it; `none` drops what is not exact.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    density: Ratio = option(0.1, "share of key blocks that is exact", ge=0, le=1)
    first_order: bool = option(True, "values follow keys inside of blocks")
    tail: Tail = tail_option("pooled")  # noqa: RUF009 - it returns a field
    kernel: EngineKernel = option("auto", "kernel that runs")


class PisaRouter(Router[PisaConfig]):
    """The blocks whose means match best."""

    def cut(self, settings: PisaConfig, grid: Window) -> Cut:
        """Return blocks in the order of the sequence."""
        return Cut.rows(_BLOCK)

    def budget(self, settings: PisaConfig, blocks: int, tokens: int) -> Budget:
        """Return how many of the blocks are exact."""
        return Budget.of_share(settings.density, blocks)

    def first_order(self, settings: PisaConfig) -> bool:
        """Whether values follow keys inside of blocks."""
        return settings.first_order

    def limits(self, settings: PisaConfig) -> Limits:
        """One matrix per head is of all keys of a call, and has no gradient over ranks."""
        if not settings.first_order:
            return Limits()
        slope = "its first-order term is a sum over all keys of one call"
        return Limits(cache=slope, ring_gradients=slope)


class PisaBackend(SparseBackend):
    """PISA."""

    backend = AttentionBackendEnum.PISA_ATTN
    summary = "PISA: the best blocks exactly, the others to first order"
    config_cls = PisaConfig
    router = PisaRouter
