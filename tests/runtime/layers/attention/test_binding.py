"""Kernel packages that are installed and do not import."""

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, SelectionScope, Source
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.fakes import ALL_FEATURES, PlainImpl, fake_backend
from tests.helpers.inputs import make_qkv

FA, SDPA = AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA
# Any installed package will do: the stand-in pretends that importing it fails.
KERNELS = PackageProbe(module="torch.fft", distribution="torch", install="")
REASON = "torch.fft is installed but does not import: undefined symbol _ZN3c10; reinstall it for"


class BrokenImpl(PlainImpl):
    """The kernels of a package built for another torch."""

    tries = 0

    def __init__(self, *args, **fields):
        BrokenImpl.tries += 1
        raise ImportError("undefined symbol _ZN3c10")


@pytest.fixture(autouse=True)
def _broken_package(use_backends):
    BrokenImpl.tries = 0
    use_backends(
        fake_backend("fa", impl=BrokenImpl, packages=(KERNELS,)), fake_backend("torch_sdpa")
    )


def asked(backend) -> SelectionScope:
    return SelectionScope(default=BackendPreference(source=Source.SETTINGS, backend=backend))


def test_the_automatic_choice_goes_on_and_records_the_import_that_failed():
    for _ in range(2):
        layer = LocalAttention(2, 8)
        layer(*make_qkv(1, 3, 2, 8))
        (entry,) = layer.report().entries
        assert (entry.selection.backend, entry.calls) == (SDPA, 1)
        assert REASON in str(entry.selection.rejected[0])
    assert BrokenImpl.tries == 1


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_named_backend_that_does_not_import_is_refused_with_the_remedy(dtype):
    for _ in range(2):
        with pytest.raises(UnsupportedBackendError, match=f"fa: {REASON}"):
            LocalAttention(2, 8, compute_dtype=dtype, scope=asked(FA))(*make_qkv(1, 3, 2, 8))


def test_a_substitute_that_does_not_import_is_passed_over_too(use_backends):
    without_masks = ALL_FEATURES - {Feature.KEY_MASK, Feature.DENSE_MASK, Feature.VARLEN}
    use_backends(
        fake_backend("flex_attn", features=without_masks),
        fake_backend("fa", impl=BrokenImpl, packages=(KERNELS,)),
        fake_backend("torch_sdpa"),
    )
    layer = LocalAttention(2, 8)
    layer(*make_qkv(1, 3, 2, 8), torch.ones(1, 3).bool())
    assert layer.report().detours[0].selection.backend is SDPA


def test_an_import_error_of_a_backend_without_packages_is_not_hidden(use_backends):
    use_backends(fake_backend("fa", impl=BrokenImpl), fake_backend("torch_sdpa"))
    with pytest.raises(ImportError, match=r"undefined symbol"):
        LocalAttention(2, 8, compute_dtype=torch.float32)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_layer_rounds_where_the_kernel_it_was_given_does(use_backends, bits):
    backends = fake_backend("fa", operand_bits=bits), fake_backend("torch_sdpa")
    use_backends(*backends, priority=("torch_sdpa",))
    bound = LocalAttention(2, 8, scope=asked(FA)).schedule()[-1].primary
    assert bound.rounds == (bits == 8)
    wanted = SDPA if bits == 8 else FA
    assert bound.exact("may not be rounded").selection.backend is wanted
