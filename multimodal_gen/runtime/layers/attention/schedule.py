"""The steps and layers of a sparse backend that run on a dense one."""

from collections.abc import Iterator
from dataclasses import replace

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.index_selector import (
    FirstSteps,
    IndexSelector,
    Steps,
    first_of,
)
from multimodal_gen.runtime.layers.attention.notices import (
    PROCESS,
    Notices,
    notice_dense_layers,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import Asked, AskedSchedule, LayerSite
from multimodal_gen.runtime.platforms import PlatformEnum

__all__ = ["with_dense_parts"]


def with_dense_parts(
    schedule: AskedSchedule, site: LayerSite, platform: PlatformEnum, notices: Notices = PROCESS
) -> AskedSchedule:
    """Add to a schedule the parts that sparse backends leave to a dense one.

    Args:
        schedule: who asks for what; the first entry whose steps hold is the one that runs.
        site: where the layer sits.
        platform: where it runs.
        notices: of the pipeline, told where all of its layers are dense.

    Raises:
        ConfigError: a sparse backend was asked for without parameters it must have, or with a share
            of layers whose number is unknown.
    """
    if site.role is not AttentionRole.SELF:
        return schedule
    found: list[tuple[Steps | None, Asked]] = []
    for steps, asked in schedule:
        config = _sparse_config(asked, platform)
        if config is None:
            found.append((steps, asked))
            continue
        assert asked.backend is not None, "a configuration is a backend's"
        notice_dense_layers(config, asked.backend, site.num_layers, notices)
        found += _parts(steps, asked, site, config)
    return tuple(found)


def _parts(
    steps: Steps | None, asked: Asked, site: LayerSite, config: SparseConfig
) -> Iterator[tuple[Steps | None, Asked]]:
    dense_steps, dense_layers = config.dense_schedule()
    first_steps, first_layers = config.dense_first()
    if site.layer is not None and (
        (dense_layers is not None and site.layer in dense_layers)
        or site.layer < _num_layers(first_layers, site, asked)
    ):
        because = f"layer {site.layer} is among the dense layers of {asked.backend}"
        yield steps, replace(asked, dense_because=because)
        return
    for dense in (dense_steps, _first(first_steps)):
        shared = dense if dense is None else _among(dense, steps)
        if shared is not None:
            because = f"steps {shared} are dense steps of {asked.backend}"
            yield shared, replace(asked, dense_because=because)
    yield steps, asked


def _num_layers(first: float, site: LayerSite, asked: Asked) -> int:
    """Return how many first layers stay dense."""
    if first > 1 or first == 0:
        return int(first)
    if site.num_layers is None:
        raise ConfigError(
            f"{asked.backend} must know how many layers a model has to keep a share of them dense, "
            f"got layer {site.layer} of an unknown number; pass site=LayerSite(layer=..., "
            f"num_layers=...), or give a number of layers above 1 or 0"
        )
    return first_of(first, site.num_layers)


def _first(first: float) -> Steps | None:
    """Return the first steps that stay dense."""
    if first == 0:
        return None
    return FirstSteps(first) if first <= 1 else IndexSelector(((0, int(first) - 1),))


def _among(dense: Steps, steps: Steps | None) -> Steps | None:
    """Return the steps in both, or None where there are none."""
    if steps is None:
        return dense
    assert isinstance(steps, IndexSelector), "only this module makes others"
    return FirstSteps(dense.share, steps) if isinstance(dense, FirstSteps) else steps & dense


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
