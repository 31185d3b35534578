"""Every test here starts without a forced backend, remembered selections or given warnings."""

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from multimodal_gen.runtime import platforms
from multimodal_gen.runtime.layers.attention import binding, selector, warn_once
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.platforms.devices import CpuPlatform


def _forget() -> None:
    selector.global_force_attn_backend(None)
    selector._resolve.cache_clear()
    warn_once.PROCESS._given.clear()
    binding._BROKEN.clear()
    platforms.current_platform.cache_clear()
    for remembered in (registry.current_environment, registry.cpu_environment):
        remembered.cache_clear()


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend this machine has no accelerator, except to tests that need it."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(platforms, "detect_platform", CpuPlatform)
    _forget()
    yield
    _forget()


@pytest.fixture
def use_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces every backend.

    The automatic choice then follows `priority`, by default the order in which they are given.
    """

    def use(*classes: type[AttentionBackend], priority: tuple[str, ...] | None = None) -> None:
        names = priority or tuple(str(cls.backend) for cls in classes)
        by_name: dict[AttentionBackendEnum, tuple[type[AttentionBackend], ...]] = {}
        for cls in classes:
            by_name[cls.backend] = (*by_name.get(cls.backend, ()), cls)

        class FakePlatform(CpuPlatform):
            order: ClassVar = tuple(AttentionBackendEnum(name) for name in names)

            def attention_priority(self, capability):
                return self.order

        monkeypatch.setattr(platforms, "detect_platform", FakePlatform)
        monkeypatch.setattr(registry, "backends_of", by_name.__getitem__)
        monkeypatch.setattr(registry, "all_backends", lambda: tuple(by_name))
        packages = frozenset(probe for cls in classes for probe in cls.declared_packages())
        monkeypatch.setattr(registry, "_probes", lambda: packages)
        _forget()

    return use
