"""The steps and layers of a sparse backend that run on a dense one."""

from collections.abc import Iterator
from dataclasses import replace

from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.index_selector import IndexSelector
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import Asked, AskedSchedule, LayerSite
from multimodal_gen.runtime.platforms import PlatformEnum

__all__ = ["with_dense_parts"]


def with_dense_parts(
    schedule: AskedSchedule, site: LayerSite, platform: PlatformEnum
) -> AskedSchedule:
    """Add to a schedule the parts that sparse backends leave to a dense one.

    Args:
        schedule: who asks for what; the first entry whose steps hold is the one that runs.
        site: where the layer sits.
        platform: where it runs.

    Raises:
        ConfigError: a sparse backend was asked for without parameters it must have.
    """
    if site.role is not AttentionRole.SELF:
        return schedule
    return tuple(part for steps, asked in schedule for part in _parts(steps, asked, site, platform))


def _parts(
    steps: IndexSelector | None, asked: Asked, site: LayerSite, platform: PlatformEnum
) -> Iterator[tuple[IndexSelector | None, Asked]]:
    config = _sparse_config(asked, platform)
    if config is None:
        yield steps, asked
        return
    dense_steps, dense_layers = config.dense_schedule()
    if dense_layers is not None and site.layer is not None and site.layer in dense_layers:
        because = f"layer {site.layer} is among the dense layers of {asked.backend}"
        yield steps, replace(asked, dense_because=because)
        return
    if dense_steps is not None:
        shared = dense_steps if steps is None else steps & dense_steps
        if shared is not None:
            because = f"steps {shared} are dense steps of {asked.backend}"
            yield shared, replace(asked, dense_because=because)
    yield steps, asked


def _sparse_config(asked: Asked, platform: PlatformEnum) -> SparseConfig | None:
    if asked.backend is None or not asked.backend.is_sparse:
        return None
    config = asked.config
    if config is None:
        cls = find_backend(asked.backend, platform)
        if cls.not_in_this_build:
            return None
        config = cls.config_cls()
    return config if isinstance(config, SparseConfig) else None
