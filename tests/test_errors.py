"""What is said of the errors of others."""

from typing import Any

import pytest
import torch

from multimodal_gen.errors import ConfigError, first_line, is_out_of_memory, short
from multimodal_gen.runtime.server_args import ServerArgs


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
    "value",
    ["x" * 70_000, b"x" * 70_000, ["x" * 70_000] * 9, {"x" * 70_000: "y" * 70_000}, 10**4_999],
    ids=["text", "bytes", "list", "mapping", "number"],
)
def test_a_value_of_any_length_fits_in_a_line(value: object) -> None:
    assert len(short(value)) < 210


def test_a_value_that_fits_is_whole() -> None:
    assert short("x" * 190) == repr("x" * 190)


LONG = "x" * 70_000


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": LONG},
        {"backend": LONG},
        {"cache": LONG, "enable_torch_compile": True},
        {"component_attention_backends": LONG},
        {"dtype": LONG},
        {"height": LONG},
        {"latent_grid": LONG},
        {"pipeline_arg": LONG},
        {"prompt": [LONG]},
        {"quantize": f"transformer={LONG}"},
        {"sigmas": LONG},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_refused_setting_of_any_length_leaves_its_message_short(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerArgs(model_path="m", **given)
    assert len(str(raised.value)) < 1_000


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
