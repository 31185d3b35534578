"""What is said of the errors of others."""

import pytest
import torch

from multimodal_gen.errors import first_line, is_out_of_memory


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("it failed", "it failed"),
        ("\n  it failed.\nat line 3\n", "it failed"),
        ("Missing keys:\n  a.weight\n  b.weight", "Missing keys: a.weight"),
        ("Missing keys:\n\n  a.weight\n", "Missing keys: a.weight"),
        ("Missing keys:", "Missing keys:"),
        ("", "RuntimeError"),
        (" \n ", "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (ValueError("out of memory of what was said before"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: BaseException, told: bool) -> None:
    assert is_out_of_memory(error) is told
