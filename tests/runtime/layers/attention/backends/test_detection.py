"""Optional packages are found on disk, and nothing of theirs runs."""

import sys

import pytest

from multimodal_gen.runtime.layers.attention.backends.registry import all_backends, backends_of

PROBES = sorted(
    {
        probe
        for name in all_backends()
        for cls in backends_of(name)
        for variant in cls.variants
        for probe in variant.packages
    },
    key=lambda probe: (probe.module, probe.distribution, probe.install),
)


def lay_out(folder, probe, version):
    """Create the package's files; importing any of them fails."""
    *parents, leaf = probe.module.split(".")
    here = folder
    for parent in parents:
        here = here / parent
        here.mkdir()
        (here / "__init__.py").write_text("raise RuntimeError('detection imported a package')")
    (here / f"{leaf}.py").write_text("raise RuntimeError('detection imported a module')")
    info = folder / f"{probe.distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {probe.distribution}\nVersion: {version}\n"
    )


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: f"{p.module}-{p.distribution}")
def test_a_package_is_found_with_its_version_without_running_it(probe, tmp_path, monkeypatch):
    top = probe.module.split(".")[0]
    monkeypatch.delitem(sys.modules, top, raising=False)  # e.g. triton, which torch imports
    lay_out(tmp_path, probe, "7.8.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probe.find() == "7.8.9"
    assert top not in sys.modules


def test_a_namespace_left_by_flash_attention_4_is_not_flash_attention_2(tmp_path, monkeypatch):
    probes = {probe.module: probe for probe in PROBES}
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "__init__.py").write_text("raise RuntimeError('detection imported a package')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probes["flash_attn.cute"].find() is not None
    assert probes["flash_attn.flash_attn_interface"].find() is None


def test_a_package_that_is_absent_is_reported_with_its_install_line(request_on):
    from multimodal_gen.runtime.layers.attention.backends.sage_attn import SageAttention3Backend
    from multimodal_gen.runtime.platforms import PlatformEnum

    request = request_on(PlatformEnum.CUDA, capability=(12, 0))
    (reason,) = SageAttention3Backend.unsupported_reasons(request)
    assert reason.startswith("needs the package sageattn3, which is not installed (build ")
