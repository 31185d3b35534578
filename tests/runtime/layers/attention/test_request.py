import sys

import pytest
import torch

from multimodal_gen.kernels.requirements import Capability, HeadSizes, PackageProbe, installed
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Environment,
    Feature,
)
from multimodal_gen.runtime.platforms import DeviceCapability, PlatformEnum
from multimodal_gen.runtime.platforms.devices import CpuPlatform

PROBE = PackageProbe(
    module="exploding_attn.kernels.fast",
    distribution="exploding-attn",
    install="pip install exploding-attn",
    minimum="2.1",
    below="3",
)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed package whose import raises; return a function that sets its version."""
    kernels = tmp_path / "exploding_attn" / "kernels"
    kernels.mkdir(parents=True)
    for source in (kernels.parent / "__init__.py", kernels / "__init__.py", kernels / "fast.py"):
        source.write_text("raise AssertionError('detection must not import')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def set_version(version: str) -> None:
        info = tmp_path / f"exploding_attn-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: exploding-attn\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)

    installed.cache_clear()
    yield set_version
    installed.cache_clear()


def environment(**known) -> Environment:
    return Environment(platform=PlatformEnum.CUDA, capability=DeviceCapability(8, 0), **known)


def with_version(version: str) -> Environment:
    return environment(packages=frozenset({(PROBE.module, PROBE.distribution, version)}))


def request(**changes) -> AttentionRequest:
    fields = {
        "environment": environment(),
        "head_size": 64,
        "num_heads": 8,
        "num_kv_heads": 8,
        "dtype": torch.bfloat16,
    }
    return AttentionRequest(**(fields | changes))


def variant(**changes) -> Variant:
    fields = {
        "name": "kernel",
        "platforms": frozenset({PlatformEnum.CUDA, PlatformEnum.ROCM}),
        "dtypes": frozenset({torch.bfloat16, torch.float16}),
        "head_sizes": HeadSizes(listed=(64, 128)),
        "features": frozenset(),
    }
    return Variant(**(fields | changes))


def test_detection_finds_a_package_and_its_version_without_importing_it(package):
    package("2.4.1")
    found = Environment.of(CpuPlatform(), [PROBE])
    assert found.version(PROBE) == "2.4.1"
    assert found.lacks(PROBE) is None
    assert not any(name.startswith("exploding_attn") for name in sys.modules)


def test_a_package_without_metadata_has_no_version_and_will_do(package):
    found = Environment.of(CpuPlatform(), [PROBE])
    assert found.version(PROBE) == ""
    assert found.lacks(PROBE) is None


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "module", ["exploding_attn.kernels.slow", "exploding_attn.other.fast", "not_there_at_all"]
)
def test_a_missing_module_is_absent(module):
    probe = PackageProbe(module=module, distribution="exploding-attn", install="")
    assert probe.find() is None


@pytest.mark.parametrize("suffix", [".cpython-311-x86_64-linux-gnu.so", ".abi3.so", ".py"])
def test_compiled_and_plain_modules_are_found(monkeypatch, tmp_path, suffix):
    (tmp_path / "built_attn").mkdir()
    (tmp_path / "built_attn" / "__init__.py").touch()
    (tmp_path / "built_attn" / f"_C{suffix}").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert PackageProbe(module="built_attn._C", distribution="x-none", install="").find() == ""


def test_a_namespace_over_two_folders_is_searched_in_both(monkeypatch, tmp_path):
    for folder, part in (("a", "first"), ("b", "second")):
        (tmp_path / folder / "spread_attn" / part).mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
    for part in ("first", "second"):
        probe = PackageProbe(module=f"spread_attn.{part}", distribution="x-none", install="")
        assert probe.find() == ""


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    assert environment().lacks(PROBE) == (
        "needs the package exploding_attn.kernels.fast, which is not installed "
        "(pip install exploding-attn)"
    )


@pytest.mark.parametrize("version", ["2.0.9", "2", "1.9", "2.0rc1", "2.0.5+cu128"])
def test_a_package_that_is_too_old_says_what_it_found(version):
    assert with_version(version).lacks(PROBE) == (
        f"needs exploding-attn >= 2.1, found {version} (pip install exploding-attn)"
    )


@pytest.mark.parametrize("version", ["3", "3.0.0", "3.1", "10.0"])
def test_a_package_that_is_too_new_says_what_it_found(version):
    assert with_version(version).lacks(PROBE) == (
        f"needs exploding-attn < 3, found {version} (pip install exploding-attn)"
    )


@pytest.mark.parametrize("version", ["2.1", "2.1.0", "2.10", "2.1.0.post1+cu128", "2.99b3"])
def test_a_version_within_bounds_will_do(version):
    assert with_version(version).lacks(PROBE) is None


@pytest.mark.parametrize(("found", "minimum"), [("2.0", "2.0.0"), ("2", "2.0"), ("2.0.0", "2")])
def test_trailing_zeros_of_a_version_do_not_matter(found, minimum):
    probe = PackageProbe(module="m", distribution="d", install="", minimum=minimum)
    packages = frozenset({("m", "d", found)})
    assert environment(packages=packages).lacks(probe) is None


@pytest.mark.parametrize(
    ("declared", "asked", "reason"),
    [
        (
            {"platforms": frozenset({PlatformEnum.ROCM, PlatformEnum.XPU})},
            {},
            "needs platform rocm or xpu, this is cuda",
        ),
        (
            {"capability": Capability(minimum=(9, 0))},
            {},
            "needs compute capability >= 9.0, this GPU has 8.0",
        ),
        (
            {"capability": Capability(below=(8, 0))},
            {},
            "needs compute capability < 8.0, this GPU has 8.0",
        ),
        (
            {"capability": Capability(exact=((9, 0), (10, 0)))},
            {},
            "needs compute capability 9.0 or 10.0, this GPU has 8.0",
        ),
        ({}, {"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
        ({}, {"head_size": 96}, "needs head size 64/128, got 96"),
        (
            {"head_sizes": HeadSizes(maximum=48, multiple_of=8)},
            {},
            "needs head size <= 48, multiple of 8, got 64",
        ),
        (
            {"head_sizes": HeadSizes(minimum=72)},
            {},
            "needs head size >= 72, got 64",
        ),
        (
            {"head_sizes": HeadSizes(minimum=72, maximum=96)},
            {},
            "needs head size 72 to 96, got 64",
        ),
        (
            {"roles": frozenset({AttentionRole.SELF})},
            {"role": AttentionRole.CROSS},
            "serves self attention, this layer is cross attention",
        ),
        ({}, {"num_kv_heads": 2}, "does not support gqa"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_reason_states_requirement_and_actual(declared, asked, reason):
    assert variant(**declared).unsupported_reasons(request(**asked)) == (reason,)


@pytest.mark.parametrize("feature", list(Feature), ids=str)
def test_each_feature_is_a_reason_where_it_is_missing_and_none_where_it_is_there(feature):
    needy = request().with_needs(feature)
    assert variant().unsupported_reasons(needy) == (f"does not support {feature}",)
    assert variant(features=frozenset({feature})).unsupported_reasons(needy) == ()


def test_every_reason_is_given_at_once():
    needy = request(dtype=torch.float32, head_size=80, num_kv_heads=1).with_needs(Feature.CAUSAL)
    assert variant(packages=(PROBE,)).unsupported_reasons(needy) == (
        "needs the package exploding_attn.kernels.fast, which is not installed "
        "(pip install exploding-attn)",
        "needs dtype bfloat16 or float16, got float32",
        "needs head size 64/128, got 80",
        "does not support causal",
        "does not support gqa",
    )


def test_capability_is_checked_on_nvidia_gpus_only():
    amd = Environment(platform=PlatformEnum.ROCM, capability=DeviceCapability(9, 4))
    wants = variant(capability=Capability(exact=((9, 0),)))
    assert wants.unsupported_reasons(request(environment=amd)) == ()


@pytest.mark.parametrize(
    ("sizes", "inside", "outside", "text"),
    [
        (HeadSizes(), (1, 7, 512), (0,), "any"),
        (HeadSizes(listed=(64, 128)), (64, 128), (96,), "64/128"),
        (HeadSizes(maximum=256, multiple_of=8), (8, 256), (12, 264), "<= 256, multiple of 8"),
        (HeadSizes(minimum=16), (16, 17), (15,), ">= 16"),
        (HeadSizes(minimum=16, maximum=64), (16, 64), (15, 65), "16 to 64"),
    ],
)
def test_head_sizes_hold_what_they_say(sizes, inside, outside, text):
    assert all(size in sizes for size in inside)
    assert not any(size in sizes for size in outside)
    assert "64" not in sizes
    assert str(sizes) == text


def test_an_equal_request_is_the_same_cache_key():
    assert request() == request()
    assert hash(request()) == hash(request())
    assert request() != request(head_size=128)
    assert request().with_needs(Feature.LSE).needs == {Feature.LSE}
