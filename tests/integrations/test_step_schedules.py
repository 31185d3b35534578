"""Steps named by noise levels, in whole pipelines, against the scheduler's own values."""

import pytest
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.steps import StepTracker
from multimodal_gen.runtime.layers.attention.config import SigmaSelector, StepSet
from multimodal_gen.runtime.layers.attention.report import SigmaSteps
from tests.integrations.conftest import generate

VSA = "video_sparse_attn"
BOUND = 0.6

SCHEDULERS = {
    "shifted a little": lambda: UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.5
    ),
    "shifted far": lambda: FlowMatchEulerDiscreteScheduler(shift=12.0),
    "of second order": lambda: FlowMatchHeunDiscreteScheduler(shift=3.0),
}


@pytest.mark.slow_cases("shifted a little-6", "shifted far-6")
@pytest.mark.parametrize(
    ("scheduler", "num_steps"),
    [("shifted a little", 6), ("shifted far", 6), ("shifted far", 2), ("of second order", 3)],
)
def test_steps_of_a_noise_level_are_those_of_the_scheduler(scheduler, num_steps, fresh, calls):
    pipe = fresh("wan")
    pipe.scheduler = SCHEDULERS[scheduler]()
    config = {"topk": 1, "dense_sigma": f">{BOUND}"}
    with apply(pipe, attention_backend=VSA, attention_backend_config=config) as handle:
        before = handle.report()
        generate(pipe, "wan", num_inference_steps=num_steps)
        report = handle.report()
    sigmas = pipe.scheduler.sigmas[: len(pipe.scheduler.timesteps)].tolist()
    noisy = [step for step, sigma in enumerate(sigmas) if sigma > BOUND]
    assert 0 < len(noisy) < len(sigmas)
    for layer in report.layers:
        if layer.component != "transformer" or str(layer.role) != "self":
            continue
        dense, sparse = layer.entries
        assert [step for step, _ in sparse.densities] == [*range(len(noisy), len(sigmas))]
        assert dense.calls == 2 * len(noisy)  # two guidance branches
        assert dense.steps == f"0-{len(noisy) - 1}".replace("0-0", "0")
        levels = [sigmas[step] for step in noisy]
        assert dense.as_dict()["sigma"] == {
            "asked": f">{BOUND}",
            "highest": max(levels),
            "lowest": min(levels),
        }
    assert ", steps of sigma >0.6: " in before.summary()
    assert f"(sigma >0.6: {max(levels):.4g} to {min(levels):.4g})" in report.summary()
    seen = {(call.context.current_timestep, call.context.sigmas) for call in calls if call.context}
    assert {sigmas for _, sigmas in seen} == {tuple(sigmas)}


@pytest.mark.parametrize(
    ("num_steps", "text"),
    [(50, "0-17 (sigma >0.9: 1 to 0.9067)"), (4, "0-1 (sigma >0.9: 1 to 0.9376)")],
)
def test_a_shift_and_a_run_of_a_few_steps_are_followed_as_the_page_says(num_steps, text):
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    tracker = StepTracker(lambda: scheduler)
    tracker.reads_sigmas = True
    scheduler.set_timesteps(num_steps)
    step = tracker.locate(float(scheduler.timesteps[0]), scheduler.timesteps.dtype)
    assert step.sigmas is not None
    assert len(step.sigmas) == step.num_steps == num_steps
    named = SigmaSteps.of(StepSet(sigma=SigmaSelector.parse(">0.9")), step.sigmas)
    assert f"{named.steps} ({named})" == text


def test_a_rule_may_name_noise_levels_that_the_run_does_not_have(fresh):
    pipe = fresh("wan")
    rule = {"component": "transformer", "role": "self", "sigma": ">14", "backend": "flex_attn"}
    with apply(pipe, attention_config={"rules": [rule]}) as handle:
        generate(pipe, "wan", num_inference_steps=2)
        text = handle.report().summary()
    assert "steps none (sigma >14: the run's are " in text


def test_a_scheduler_without_noise_levels_is_refused_and_says_what_it_has(fresh):
    pipe = fresh("cogvideox")
    name = type(pipe.scheduler).__name__
    message = (
        rf"steps of sigma >0\.9 must be those of a scheduler that has sigmas, got {name}, which "
        rf"has betas, .*timesteps.*; name steps by their indices"
    )
    config = {"sparsity": 0.5, "dense_sigma": ">0.9"}
    with pytest.raises(UsageError, match=message):
        apply(pipe, attention_backend=VSA, attention_backend_config=config)
    with pytest.raises(UsageError, match="got none: a model outside of a pipeline has no schedul"):
        apply(fresh("wan").transformer, attention_backend=VSA, attention_backend_config=config)


def test_a_scheduler_that_is_set_later_is_refused_before_the_first_layer(fresh, calls):
    pipe = fresh("cogvideox")
    own, pipe.scheduler = pipe.scheduler, SCHEDULERS["shifted a little"]()
    config = {"sparsity": 0.5, "dense_sigma": ">0.9"}
    with apply(pipe, attention_backend=VSA, attention_backend_config=config):
        pipe.scheduler = own
        with pytest.raises(UsageError, match="a scheduler that has sigmas, got CogVideoXD"):
            generate(pipe, "cogvideox")
    assert not [call for call in calls if call.site.component == "transformer"]
