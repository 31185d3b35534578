import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.models.attention_dispatch import dispatch_attention_fn

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.generator.failures import (
    diffusers_backend_explained,
    out_of_memory_explained,
    refusal_explained,
)


def _attend(backend: str = "native", heads: int = 2) -> None:
    query = torch.ones(1, 4, 2, 8)
    dispatch_attention_fn(query, torch.ones(1, 4, heads, 8), query, backend=backend)


def test_a_backend_that_fails_its_first_call_is_named_with_what_it_said() -> None:
    rule = r"must be one that diffusers can run here, got _native_cudnn, which failed: No .*native,"
    with pytest.raises(UsageError, match=rule), diffusers_backend_explained("_native_cudnn"):
        _attend("_native_cudnn")


def test_the_native_backend_is_not_its_own_remedy() -> None:
    rule = "got native, which failed: .*; use --backend sglang"
    with pytest.raises(UsageError, match=rule), diffusers_backend_explained("native"):
        _attend(heads=3)


def test_without_a_name_an_error_of_the_dispatch_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), diffusers_backend_explained(None):
        _attend(heads=3)


@pytest.mark.parametrize(
    "error",
    [ArithmeticError("a defect"), UnsupportedBackendError("ours"), RuntimeError("a defect")],
)
def test_errors_from_elsewhere_stay_what_they_are(error: Exception) -> None:
    with (
        pytest.raises(type(error), match=str(error)) as caught,
        diffusers_backend_explained("flex"),
    ):
        raise error
    assert caught.value is error


def test_full_memory_inside_the_dispatch_is_told_as_such(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", full)
    with (
        pytest.raises(UsageError, match=r"the device ran out of memory .* try a smaller --height"),
        out_of_memory_explained(),
        diffusers_backend_explained("native"),
    ):
        _attend()


def test_a_refusal_by_a_scheduler_is_told_in_one_line() -> None:
    rule = "the pipeline refuses its arguments: `num_inference_steps`: 1001 cannot be larger"
    with pytest.raises(UsageError, match=rule), refusal_explained():
        DDIMScheduler().set_timesteps(1001)


def test_a_value_error_from_below_a_pipeline_keeps_its_type() -> None:
    def defect(*args, **kwargs):
        raise ValueError("a defect")

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.time_shift = scheduler.stretch_shift_to_terminal = defect
    scheduler.register_to_config(use_dynamic_shifting=True)
    with pytest.raises(ValueError, match=r"^a defect$") as caught, refusal_explained():
        scheduler.set_timesteps(4, mu=1.0)
    assert not isinstance(caught.value, UsageError)
