import pickle
import subprocess
import sys

import pytest

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime import backend_names
from multimodal_gen.runtime.platforms import (
    BUILTIN_PLATFORMS,
    AttentionBackendEnum,
    DeviceCapability,
    PlatformEnum,
)
from multimodal_gen.runtime.platforms.devices import CpuPlatform, CudaPlatform, RocmPlatform


class Gpu(CudaPlatform):
    def __init__(self, *capability: int) -> None:
        self.capability = DeviceCapability(*capability)

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
        return self.capability


@pytest.mark.parametrize("member", list(AttentionBackendEnum), ids=str)
def test_every_backend_is_parsed_from_its_own_spellings(member):
    name = str(member)
    for text in (name, name.upper(), f"  {name} ", name.replace("_", "-"), member.name):
        assert AttentionBackendEnum.parse(text) is member


@pytest.mark.parametrize(
    ("alias", "meaning"),
    [
        ("fa3", "fa"),
        ("FA4", "fa"),
        ("flash-attn", "fa"),
        ("sdpa", "torch_sdpa"),
        ("cudnn-sdpa", "torch_cudnn_sdpa"),
    ],
)
def test_an_alias_means_its_backend(alias, meaning):
    assert str(AttentionBackendEnum.parse(alias)) == meaning


def test_an_unknown_backend_lists_the_names_and_the_nearest_one():
    with pytest.raises(ConfigError, match=r"must be one of fa, torch_sdpa, .*got 'sage_atn', did"):
        AttentionBackendEnum.parse("sage_atn")
    with pytest.raises(ConfigError, match=r"did you mean 'sage_attn'"):
        AttentionBackendEnum.parse("sage_atn")


def test_a_name_like_nothing_known_gets_no_suggestion():
    with pytest.raises(ConfigError, match=r"got 'zzz'$"):
        AttentionBackendEnum.parse("zzz")


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match=r"got '  '"):
        AttentionBackendEnum.parse("  ")


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    monkeypatch.setattr(backend_names, "_PLUGINS", {})


def test_a_plugin_name_becomes_a_member_that_iteration_does_not_list():
    member = AttentionBackendEnum.register_plugin_name(" Plugged_Attn ")
    assert AttentionBackendEnum.register_plugin_name("plugged_attn") is member
    assert AttentionBackendEnum("plugged_attn") is member
    assert AttentionBackendEnum.parse("plugged-attn") is member
    assert (str(member), member.name) == ("plugged_attn", "PLUGGED_ATTN")
    assert member not in list(AttentionBackendEnum)
    assert not member.is_sparse
    assert pickle.loads(pickle.dumps(member)) is member


def test_a_plugin_is_sparse_once_its_class_says_so_whoever_named_it_first():
    member = AttentionBackendEnum.register_plugin_name("plugged_attn")
    assert AttentionBackendEnum.register_plugin_name("plugged_attn", sparse=True) is member
    assert member.is_sparse
    assert AttentionBackendEnum.register_plugin_name("plugged_attn").is_sparse


def test_a_registered_plugin_name_is_listed_in_errors():
    AttentionBackendEnum.register_plugin_name("plugged_attn")
    with pytest.raises(ConfigError, match=r"plugged_attn, got 'plugged_atn', did you mean"):
        AttentionBackendEnum.parse("plugged_atn")


def test_registering_a_builtin_name_returns_the_builtin():
    assert AttentionBackendEnum.register_plugin_name("fa") is AttentionBackendEnum.FA


@pytest.mark.parametrize("name", ["", "two words", "1st", "a-b"])
def test_a_plugin_name_that_is_no_identifier_is_refused(name):
    with pytest.raises(ConfigError, match=r"must be an identifier, got"):
        AttentionBackendEnum.register_plugin_name(name)


def test_the_documented_members_exist_and_the_sparse_ones_say_so():
    sparse = {str(member) for member in AttentionBackendEnum if member.is_sparse}
    assert sparse == {
        "sliding_tile_attn",
        "video_sparse_attn",
        "vmoba_attn",
        "sla_attn",
        "sage_sla_attn",
        "sparse_video_gen_2_attn",
        "sol_attn",
        "subblock_sparse_attn",
        "pisa_attn",
        "static_sparse_attn",
        "sparge_attn",
        "cube_sparse_attn",
        "nabla_attn",
        "draft_attn",
        "bsa_attn",
        "video_sparse_attn_h3",
        "skip_softmax",
    }
    documented = {"FA", "TORCH_SDPA", "SAGE_ATTN", "SAGE_ATTN_3", "AITER", "AITER_SAGE"}
    assert documented <= set(AttentionBackendEnum.__members__)


def test_a_capability_reads_as_version_and_as_number():
    capability = DeviceCapability(8, 9)
    assert (capability.as_version_str(), capability.to_int()) == ("8.9", 89)
    assert capability < (9, 0)


def test_has_device_capability_takes_pairs_and_numbers():
    gpu = Gpu(8, 9)
    assert gpu.has_device_capability((8, 9))
    assert gpu.has_device_capability(80)
    assert not gpu.has_device_capability((9, 0))
    assert not gpu.has_device_capability(90)


def test_a_platform_without_capability_reaches_none():
    assert CpuPlatform().get_device_capability() is None
    assert not CpuPlatform().has_device_capability(0)


@pytest.mark.parametrize(
    ("capability", "hopper", "blackwell", "sm120"),
    [
        ((8, 9), False, False, False),
        ((9, 0), True, False, False),
        ((10, 0), False, True, False),
        ((10, 3), False, True, False),
        ((12, 0), False, False, True),
    ],
)
def test_gpu_generations_are_told_apart(capability, hopper, blackwell, sm120):
    gpu = Gpu(*capability)
    assert (gpu.is_hopper(), gpu.is_blackwell(), gpu.is_sm120()) == (hopper, blackwell, sm120)


def test_an_amd_gpu_is_of_no_nvidia_generation():
    class Amd(RocmPlatform):
        def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

    assert not Amd().is_hopper()
    assert not Amd().is_blackwell()
    assert not Amd().is_sm120()


@pytest.mark.parametrize("cls", BUILTIN_PLATFORMS, ids=lambda cls: str(cls.name))
def test_exactly_the_own_kind_answers_is(cls):
    answers = {
        str(kind): getattr(cls(), f"is_{kind}")() for kind in PlatformEnum if kind.value != "oot"
    }
    assert [kind for kind, yes in answers.items() if yes] == [str(cls.name)]


def priority(platform, *capability: int) -> list[str]:
    reached = DeviceCapability(*capability) if capability else None
    return [str(backend) for backend in platform.attention_priority(reached)]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), ["torch_sdpa"]),
        ((8, 0), ["fa", "torch_sdpa"]),
        ((8, 9), ["fa", "torch_sdpa"]),
        ((9, 0), ["triton_attn", "fa", "torch_sdpa"]),
        ((10, 0), ["fa", "torch_sdpa"]),
        ((12, 0), ["torch_sdpa"]),
    ],
)
def test_nvidia_gpus_prefer_what_is_fastest_on_them(capability, expected):
    assert priority(CudaPlatform(), *capability) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rocm", ["fa", "torch_sdpa"]),
        ("xpu", ["fa", "torch_sdpa"]),
        ("musa", ["fa", "torch_sdpa"]),
        ("mps", ["torch_sdpa"]),
        ("npu", ["torch_sdpa", "fa"]),
        ("cpu", ["torch_sdpa"]),
    ],
)
def test_other_platforms_follow_their_documented_order(name, expected):
    platform = next(cls for cls in BUILTIN_PLATFORMS if str(cls.name) == name)()
    assert priority(platform) == expected


def test_only_the_documented_platforms_fall_back_to_sdpa():
    falling = {str(cls.name) for cls in BUILTIN_PLATFORMS if cls.dense_fallback}
    assert falling == {"xpu", "musa", "npu", "cpu"}
    assert {str(cls.name) for cls in BUILTIN_PLATFORMS if cls.always} == {"mps"}


def test_a_process_that_has_not_looked_for_plug_ins_learns_a_name_with_its_member() -> None:
    member = AttentionBackendEnum.register_plugin_name("sent_backend", sparse=True)
    code = f"import pickle; found = pickle.loads({pickle.dumps(member)!r}); " + (
        "print(found, found.is_sparse)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sent_backend", "True"]
