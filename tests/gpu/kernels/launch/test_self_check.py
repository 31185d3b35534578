"""The self-checks of the Gluon kernels pass with whatever triton is installed."""

import pytest
import torch

from multimodal_gen.kernels.engine import TRITON_WITH_GLUON
from multimodal_gen.kernels.launch.self_check import forget_self_checks, self_check
from multimodal_gen.kernels.requirements import installed

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["block_sparse", "gradients", "pooled_tail", "quantized"])
def test_kernels_pass_their_self_check(name: str) -> None:
    version = installed(TRITON_WITH_GLUON)
    reason = TRITON_WITH_GLUON.unsupported_reason(version)
    if reason is not None:
        pytest.skip(reason)
    forget_self_checks()
    path = f"multimodal_gen.kernels.gluon_check:{name}"
    assert self_check(path, "kernel gluon", f"triton {version}").fault is None
