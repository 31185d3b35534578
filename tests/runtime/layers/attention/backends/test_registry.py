import importlib.metadata
import re
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.runtime import backend_names
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.layers.attention.layer import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, SelectionScope, Source
from multimodal_gen.runtime.platforms import (
    AttentionBackendEnum,
    PlatformEnum,
)
from tests.helpers.fakes import fake_backend

PLUGIN = """
import torch
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.fakes import PlainImpl, fake_backend

class MeanImpl(PlainImpl):
    def forward(self, query, key, value, context=None, *, attn_mask=None):
        return value.mean(1, keepdim=True).expand_as(query)

torch_itself = PackageProbe(module="torch", distribution="torch", install="")
MeanBackend = fake_backend("mean_attn", impl=MeanImpl, packages=(torch_itself,))
ElsewhereFA = fake_backend("fa", platforms=frozenset({PlatformEnum.OOT}), variant="elsewhere")
number = 3
"""


@pytest.fixture
def plug(monkeypatch, tmp_path):
    """Return a function that registers entry points into an importable plug-in."""
    (tmp_path / "plugged_backends.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugged_backends", raising=False)
    monkeypatch.setattr(backend_names, "_PLUGINS", {})

    def forget() -> None:
        registry._read_plugins.cache_clear()
        registry.backends_of.cache_clear()
        registry.current_environment.cache_clear()

    def register(**named: str) -> None:
        points = [EntryPoint(name, value, "any") for name, value in named.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points)
        forget()

    yield register
    monkeypatch.undo()
    forget()


def test_every_builtin_name_has_a_backend_that_knows_its_name():
    for name in AttentionBackendEnum:
        for cls in registry.backends_of(name):
            assert cls.get_enum() is name
            assert cls.summary
            assert cls.variants


def test_each_platform_gets_the_class_made_for_it():
    fa = AttentionBackendEnum.FA
    classes = {
        platform: registry.find_backend(fa, PlatformEnum(platform)).__name__
        for platform in ("cuda", "rocm", "xpu", "musa", "npu", "mps", "cpu")
    }
    assert classes == {
        "cuda": "FlashAttentionBackend",
        "rocm": "FlashAttentionBackend",
        "xpu": "XpuFlashAttentionBackend",
        "musa": "MusaFlashAttentionBackend",
        "npu": "NpuFlashAttentionBackend",
        "mps": "FlashAttentionBackend",
        "cpu": "FlashAttentionBackend",
    }


def test_a_plugin_backend_is_selected_by_name_and_computes(plug):
    plug(mean_attn="plugged_backends:MeanBackend")
    registry.load_plugins()
    mean = AttentionBackendEnum.parse("mean-attn")
    assert registry.all_backends() == (*AttentionBackendEnum, mean)
    scope = SelectionScope(default=BackendPreference(source=Source.SETTINGS, backend=mean))
    layer = LocalAttention(2, 4, scope=scope)
    assert layer.backend is mean
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    torch.testing.assert_close(layer(q, k, v), v.mean(1, keepdim=True).expand_as(q))


def test_a_plugin_may_serve_a_builtin_name_on_another_platform(plug):
    plug(fa="plugged_backends:ElsewhereFA")
    fa = AttentionBackendEnum.FA
    assert registry.find_backend(fa, PlatformEnum.OOT).variants[0].name == "elsewhere"
    assert registry.find_backend(fa, PlatformEnum.CUDA).__module__.endswith(".flash_attn")
    assert registry.all_backends() == tuple(AttentionBackendEnum)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bad_attn", "number", r"'bad_attn' .* must name a subclass of AttentionBackend, got 3; "),
        ("gone_attn", "Gone", r"'gone_attn' .* must load, got AttributeError"),
        ("median_attn", "MeanBackend", r"whose `backend` is median_attn, Fake has mean_attn"),
    ],
)
def test_a_broken_plugin_concerns_only_who_asks_for_it(plug, caplog, name, value, message):
    plug(**{name: f"plugged_backends:{value}", "mean_attn": "plugged_backends:MeanBackend"})
    assert LocalAttention(2, 4).backend is AttentionBackendEnum.TORCH_SDPA
    known = [str(backend) for backend in registry.all_backends()]
    assert "mean_attn" in known
    assert name not in known
    (warning,) = caplog.records
    assert re.search(message, warning.getMessage())
    asked = BackendPreference(source=Source.SETTINGS, backend=AttentionBackendEnum.parse(name))
    with pytest.raises(ConfigError, match=message):
        LocalAttention(2, 4, scope=SelectionScope(default=asked))


def test_a_plugin_name_that_is_no_identifier_is_left_out_with_a_warning(plug, caplog):
    plug(**{"mean attn": "plugged_backends:MeanBackend"})
    assert registry.all_backends() == tuple(AttentionBackendEnum)
    assert "must be an identifier, got 'mean attn'" in caplog.text


def test_a_name_no_package_declares_any_more_is_an_error(plug):
    plug()
    orphan = AttentionBackendEnum.register_plugin_name("orphan_attn")
    with pytest.raises(
        ConfigError, match=r"orphan_attn must be registered by an installed package"
    ):
        registry.backends_of(orphan)


def test_every_package_that_a_backend_declares_is_looked_for_and_no_other():
    declared = {
        (probe.module, probe.distribution)
        for name in AttentionBackendEnum
        for cls in registry.backends_of(name)
        for probe in cls.declared_packages()
    }
    assert {(probe.module, probe.distribution) for probe in registry.ALL_PACKAGES} == declared


def test_the_packages_of_a_plugin_are_looked_for(plug):
    plug(mean_attn="plugged_backends:MeanBackend")
    assert ("torch", "torch") in {(p.module, p.distribution) for p in registry._probes()}


def test_the_environment_holds_only_packages_that_are_installed(use_backends, monkeypatch):
    here = PackageProbe(module="torch", distribution="torch", install="")
    gone = PackageProbe(module="surely_not_here", distribution="surely-not-here", install="")
    use_backends(fake_backend("torch_sdpa", packages=(here, gone)))
    packages = registry.current_environment().packages
    assert [(module, name) for module, name, _ in packages] == [("torch", "torch")]


@pytest.mark.slow
def test_looking_at_every_backend_imports_no_optional_package(tmp_path):
    names = ("flash_attn", "sageattention", "aiter", "xformers", "flashinfer", "sageattn3")
    for name in (*names, "flash_attn_interface"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from multimodal_gen.runtime.layers.attention import LocalAttention\n"
        "from multimodal_gen.runtime.layers.attention.backends import registry\n"
        "found = {module for module, _, _ in registry.current_environment().packages}\n"
        "assert 'sageattention' in found, found\n"
        "LocalAttention(2, 64)\n"
        "print(sorted(set(sys.argv[2:]) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
