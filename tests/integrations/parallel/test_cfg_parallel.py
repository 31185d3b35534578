import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.parallel.cfg_parallel import (
    PendingTensor,
    SequentialCfg,
    fill,
    pending_tensor,
)
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.denoisers import DENOISERS
from tests.integrations.conftest import generate
from tests.integrations.parallel import pipelines
from tests.integrations.parallel.pipelines import GUIDED


@pytest.fixture
def pending():
    return pending_tensor(torch.full((2, 6, 3), torch.nan), "WanPipeline")


def test_its_form_is_known_and_parts_may_be_taken(pending):
    assert (pending.shape, pending.dtype, pending.ndim) == ((2, 6, 3), torch.float32, 3)
    assert pending.size(1) == 6
    assert pending[:, :4].shape == (2, 4, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x[:, :4].float(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.norm(x, dim=-1),
        lambda x: torch.where(torch.ones(2, 6, 3) > 0, torch.zeros(2, 6, 3), other=x),
    ],
)
def test_using_it_before_it_is_kept_is_an_error_that_names_who(pending, use):
    with pytest.raises(UsageError, match=r"WanPipeline must not use .* run without --cfg-parallel"):
        use(pending)


def test_once_kept_it_and_its_parts_are_ordinary_numbers(pending):
    part = pending[:, 1:3]
    numbers = torch.arange(36.0).view(2, 6, 3)
    fill(pending, numbers)
    assert torch.equal(pending + 0, numbers)
    assert torch.equal(part.float(), numbers[:, 1:3])
    mixed = torch.ones(2, 6, 3) + 2.0 * (pending - torch.ones(2, 6, 3))
    assert not isinstance(mixed, PendingTensor)
    assert torch.equal(mixed, 2 * numbers - 1)
    assert torch.equal(torch.cat([pending, pending]), torch.cat([numbers, numbers]))


CFG = Mesh(cfg=2)
TOLERANCE = 1e-4


@pytest.mark.slow_cases("ltx-3-3", "qwen_image-3-4", "wan-3-4", "wan22-4-6")
@pytest.mark.parametrize(
    ("family", "steps", "calls"),
    [
        # The first step of each denoiser is computed by all, to see what it returns.
        ("wan", 3, 4),
        ("wan22", 4, 6),
        ("qwen_image", 3, 4),
        # Of the prediction it takes a part, while another rank computes it.
        ("flux2_klein", 2, 3),
        pytest.param("hunyuan_video_15", 3, 4, marks=pytest.mark.slow),
        # One call for both branches: half of the batch each.
        ("ltx", 3, 3),
        ("cogvideox", 3, 3),
    ],
)
def test_each_rank_computes_its_branch(two_ranks, tiny_pipeline, fresh, family, steps, calls):
    overrides = {"num_inference_steps": steps}
    want = generate(fresh(family), family, **overrides)
    folder = tiny_pipeline(family)
    results = two_ranks.run(CFG, pipelines.latents, folder, family, overrides)
    for latents, notes, count in results:
        assert (latents - want).abs().max() <= TOLERANCE
        assert "transformer: 2 guidance branches at the same time, 1 rank each" in notes
        assert count == calls
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("family", [pytest.param("hunyuan_video", marks=pytest.mark.slow), "flux"])
def test_guidance_that_shows_in_the_first_step_only_is_shared_from_the_second_on(
    two_ranks, tiny_pipeline, fresh, family
):
    want = generate(fresh(family), family, **GUIDED)
    results = two_ranks.run(CFG, pipelines.latents, tiny_pipeline(family), family, GUIDED)
    for latents, _, count in results:
        assert (latents - want).abs().max() <= TOLERANCE
        assert count == 4


@pytest.mark.slow_cases("flux-overrides1")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("wan", {"guidance_scale": 1.0}),
        ("flux", {}),
        ("ltx", {"guidance_scale": 1.0}),
        ("cogvideox", {"guidance_scale": 1.0}),
    ],
)
def test_a_generation_without_guidance_is_refused(two_ranks, tiny_pipeline, family, overrides):
    folder = tiny_pipeline(family)
    for text in two_ranks.run(CFG, pipelines.message, folder, family, overrides):
        assert "must use classifier-free guidance under --cfg-parallel" in text
        scale = "true_cfg_scale" if family == "flux" else "guidance scale"
        assert f"pass a {scale} above 1 and" in text
        assert "drop --cfg-parallel" in text


def turns(how, touch=False):
    """Call a bare model as a pipeline does that names no branch; return what one process gets."""
    model, inputs = DENOISERS["wan"].make()
    branches = [inputs, {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"] + 1}]
    steps = [torch.full((2,), t) for t in (900.0, 500.0, 100.0)]
    with torch.no_grad():
        want = [[model(**x | {"timestep": t})[0] for x in branches] for t in steps]
        computed = []
        model.proj_out.register_forward_hook(lambda *call: computed.append(1))
        with apply(model):
            call = torch.compile(model, backend="eager") if how == "compiled" else model
            got = [[call(**x | {"timestep": t})[0] for x in branches] for t in steps[: 1 + touch]]
            if not touch:
                got += [[call(**x | {"timestep": t})[0] for x in branches] for t in steps[1:]]
            else:
                call(**inputs | {"timestep": steps[2]})[0].float()
    errors = [
        (a - b).abs().max().item()
        for theirs, ours in zip(want, got, strict=False)
        for a, b in zip(theirs, ours, strict=True)
    ]
    return errors, len(computed)


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_branches_without_a_name_are_told_by_their_order(two_ranks, how):
    for errors, computed in two_ranks.run(CFG, turns, how):
        assert len(errors) == 6
        assert max(errors) <= TOLERANCE
        assert computed == 4


def test_a_prediction_that_is_read_too_early_is_an_error_on_the_rank_that_waits_for_it(two_ranks):
    (first, _), (second, text) = two_ranks.outcomes(CFG, turns, "eager", True)
    assert (first, second) == (True, False)
    assert "transformer must not use the prediction of one guidance branch" in text


def predictions_in_two_dtypes(casts):
    """Guide a generation, then one in 16 bits; return the dtypes of what each call gets."""
    model, inputs = DENOISERS["wan"].make()
    branches = [inputs, {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"] + 1}]
    steps = [torch.full((2,), t) for t in (900.0, 500.0)]
    found = []
    with torch.no_grad(), apply(model) as handle:
        for half in (False, True):
            if half and not casts:
                model.to(torch.bfloat16)
                floats = ("hidden_states", "encoder_hidden_states")
                branches = [x | {name: x[name].bfloat16() for name in floats} for x in branches]
            with torch.autocast("cpu", torch.bfloat16, enabled=half and casts):
                got = [model(**x | {"timestep": t})[0] for t in steps for x in branches]
            found.append([x.dtype for x in got])
            handle.end_request()
    return found


@pytest.mark.parametrize("casts", [False, True])
def test_predictions_of_others_have_the_dtype_that_they_are_computed_in(two_ranks, casts):
    for single, half in two_ranks.run(CFG, predictions_in_two_dtypes, casts):
        assert single == [torch.float32] * 4
        assert half == [torch.bfloat16] * 4


class Alone:
    """Ranks of which the other one never answers."""

    branch = 1

    def share(self, *exchange):
        raise AssertionError("nothing is to be exchanged")


@pytest.mark.parametrize("name", [None, "cond"])
def test_a_model_that_gives_hints_once_per_step_is_computed_by_all(name):
    turns = SequentialCfg(Alone(), "controlnet", None)
    hints = ([torch.zeros(2)], [torch.ones(2)])
    for step in range(3):
        with set_forward_context(step) as context:
            assert turns.begin("form", context, name) is None
            assert turns.finish(hints, computed=True) is hints


def test_calls_with_other_names_are_computed_by_all():
    turns = SequentialCfg(Alone(), "transformer", None)
    with set_forward_context(0) as context:
        assert turns.begin("form", context, "cond_skip") is None
        assert torch.equal(turns.finish((torch.ones(2),), computed=True)[0], torch.ones(2))
