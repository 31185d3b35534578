"""What every test here needs and lets pass: a GPU, or several, and what others warn of on one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WARNINGS = (
    # torch's compiler and FSDP use what torch deprecates, and look at the .grad of views.
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    # What torch's compiler launches says nothing of it.
    "ignore:TRITON_DEFAULT_FP_FUSION",
    "ignore:Synchronization debug mode",
    # The compiler of FlashAttention 4 says so of an argument that is left out.
    "ignore:Argument .* cannot be converted:UserWarning",
)


@pytest.hookimpl(tryfirst=True)  # before `-m "not gpu"` looks
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark all tests here as ones that need a GPU, but for those marked `multi_gpu`."""
    import torch

    for item in items:
        if HERE not in item.path.parents:
            continue
        several = item.get_closest_marker("multi_gpu") is not None
        if not several:
            item.add_marker(pytest.mark.gpu)
        if torch.cuda.device_count() < 1 + several:
            reason = f"needs {'several CUDA devices' if several else 'a CUDA device'}"
            item.add_marker(pytest.mark.skip(reason=reason))
        for warning in WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
