"""What `apply` sets on a denoiser of one of several ranks, and takes away again."""

import copy
import re

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.components import Component, Kind
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.models.registry import ADAPTERS
from multimodal_gen.integrations.models.split_plan import SplitPlan, own_plan
from multimodal_gen.integrations.models.wan import WAN
from multimodal_gen.integrations.parallel.plan import ParallelPlan
from multimodal_gen.integrations.parallel.token_split import TokenSplitter
from multimodal_gen.runtime.distributed.groups import (
    Group,
    ParallelGroups,
    parallel_groups,
    use_parallel_groups,
)
from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.denoisers import DENOISERS, normal

BOTH = Mesh(cfg=2, ulysses=2)


def groups_of(mesh):
    """Return the groups of rank 0 of a world that is not there: nothing can be exchanged."""
    (ulysses, *_), (ring, *_) = mesh.ulysses_groups(), mesh.ring_groups()
    (sequence, *_), (cfg, *_) = mesh.sequence_groups(), mesh.cfg_groups()
    found = {"ulysses": ulysses, "ring": ring, "sequence": sequence, "cfg": cfg}
    found |= {"control": sequence, "cfg_control": cfg}
    parts = {name: Group(ranks=ranks, index=0, handle=None) for name, ranks in found.items()}
    return ParallelGroups(mesh=mesh, rank=0, **parts)


def trace(model):
    """Return everything that `apply` could have left on a model."""
    return {
        name: (
            [*module._forward_hooks.values()],
            [*module._forward_pre_hooks.values()],
            vars(module).get("forward"),
            vars(module).get("cache_context"),
            getattr(module, "processor", None),
        )
        for name, module in model.named_modules()
    }


def check_refused(model, mesh, error, message):
    """Raise AssertionError unless a model cannot be taken over, and is left as it was."""
    before = trace(model)
    with use_parallel_groups(groups_of(mesh)), pytest.raises(error, match=message):
        apply(model)
    assert trace(model) == before


@pytest.mark.parametrize("name", ["wan", "hunyuan with a first frame", "qwen", "ltx", "cogvideox"])
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(cfg=2), BOTH], ids=str)
def test_remove_leaves_a_model_as_it_was(name, mesh):
    model, _ = DENOISERS[name].make()
    before = trace(model)
    with use_parallel_groups(groups_of(mesh)):
        handle = apply(model)
        assert trace(model) != before
        handle.remove()
    assert trace(model) == before


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(cfg=2)], ids=str)
def test_a_failure_half_way_leaves_nothing(mesh, monkeypatch):
    model, _ = DENOISERS["wan"].make()

    def fail(*args, **kwargs):
        raise RuntimeError("no hooks left")

    monkeypatch.setattr(type(model), "register_forward_hook", fail)
    check_refused(model, mesh, RuntimeError, "no hooks left")


def test_a_copy_of_an_attached_model_computes_all_of_it():
    model, inputs = DENOISERS["wan"].make()
    with torch.no_grad():
        want = model(**inputs)[0]
        with use_parallel_groups(groups_of(BOTH)), apply(model):
            copied = copy.deepcopy(model)
            assert torch.equal(copied(**inputs)[0], want)


def test_a_forward_that_somebody_wrapped_since_stays_and_computes_everything():
    model, inputs = DENOISERS["wan"].make()
    with torch.no_grad():
        want = model(**inputs)[0]
        with use_parallel_groups(groups_of(Mesh(cfg=2))):
            handle = apply(model)
            ours = model.forward
            model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
            handle.remove()
        assert torch.equal(model(**inputs)[0], want)
        assert "forward" in vars(model)


def test_without_ranks_nothing_of_it_is_installed():
    model, _ = DENOISERS["wan"].make()
    with apply(model) as handle:
        assert "forward" not in vars(model)
        assert not model.patch_embedding._forward_hooks
        assert not any("ranks" in note for note in handle.report().notes)


def test_a_layer_has_to_have_a_head_for_every_rank():
    model, _ = DENOISERS["wan"].make()
    wanted = r"head for each of the 4 ranks .*--ulysses-degree 3 or les"
    check_refused(model, Mesh(ulysses=4), UsageError, wanted)


def test_a_pipeline_that_has_one_branch_only_is_refused_before_its_denoiser_changes():
    from diffusers import FluxFillPipeline

    model, _ = DENOISERS["flux"].make()
    component = Component(name="transformer", model=model, kind=Kind.DENOISER)
    pipeline = object.__new__(FluxFillPipeline)
    with pytest.raises(UsageError, match="FluxFillPipeline must not run under --cfg-parallel"):
        ParallelPlan(component, None, [3], groups_of(Mesh(cfg=2)), pipeline)


def test_a_model_without_a_plan_is_refused_with_those_that_have_one():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=12,
    )
    wanted = r"PixArtTransformer2DModel has no plan for it; run it on one GPU.*Wan"
    check_refused(model, Mesh(ulysses=2), UsageError, wanted)


def test_a_plan_that_does_not_fit_the_model_names_what_is_missing():
    model, _ = DENOISERS["wan"].make()
    del model.rope
    with pytest.raises(UsageError, match="WanTransformer3DModel must have a module rope"):
        TokenSplitter(model, WAN.split, groups_of(Mesh(ulysses=2)))


def test_fewer_tokens_than_ranks_are_refused():
    model, inputs = DENOISERS["wan"].make()
    inputs["hidden_states"] = normal(1, 4, 1, 2, 2)
    with (
        use_parallel_groups(groups_of(Mesh(ulysses=2))),
        apply(model),
        torch.no_grad(),
        pytest.raises(UsageError, match=r"a token for each of the 2 ranks .* got 1 tokens"),
    ):
        model(**inputs)


def test_gradients_are_refused_where_tokens_are_split(two_ranks):
    for text in two_ranks.run(Mesh(ulysses=2), _gradients):
        assert "must run under torch.no_grad() where its tokens are split" in text


def _gradients():
    model, inputs = DENOISERS["wan"].make()
    with apply(model), pytest.raises(UsageError) as error:
        model(**inputs)
    return str(error.value)


def test_ranks_with_different_sizes_are_told_apart(two_ranks):
    for text in two_ranks.run(Mesh(ulysses=2), _different):
        assert "must be the same on all ranks" in text


def _different():
    model, inputs = DENOISERS["wan"].make()
    if parallel_groups().rank:
        inputs["hidden_states"] = inputs["hidden_states"][:, :, :, :4]
    with apply(model), torch.no_grad(), pytest.raises(UsageError) as error:
        model(**inputs)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LTX2VideoTransformer3DModel", r"splits text too \(encoder_attention_mask, encoder_hid"),
        ("HeliosTransformer3DModel", "gathers in 120 places"),
        ("PixArtTransformer2DModel", "has no plan for it"),
    ],
)
def test_a_plan_of_a_model_that_cannot_be_followed_is_left_alone(name, reason):
    import diffusers

    assert re.search(reason, own_plan(object.__new__(getattr(diffusers, name))))


def test_our_plans_cut_what_the_models_own_do():
    """A new entry in a model's plan, except for text, must not go unnoticed."""
    import diffusers

    text = ("encoder_hidden_states", "txt_ids", "encoder_attention_mask")
    text += ("encoder_hidden_states_mask",)
    # What blocks get is cut where it is made.
    elsewhere = {
        "blocks.0": "patch_embedding",
        "transformer_blocks.0": "img_in",
    }
    seen = 0
    for name, adapter in ADAPTERS.items():
        theirs = getattr(getattr(diffusers, name), "_cp_plan", None) or {}
        if not isinstance(adapter.split, SplitPlan):  # refused, whatever the model's own plan
            continue
        if name == "HeliosTransformer3DModel":  # its plan cuts and gathers around each module
            continue
        ours = {(cut.module, cut.argument) for cut in adapter.split.cuts}
        for module, entries in theirs.items():
            if not isinstance(entries, dict):
                # With the text in front what two outputs are made of is gathered, once.
                assert module == adapter.split.gather or adapter.split.with_text
                continue
            for argument in entries:
                place = (module, argument) if isinstance(argument, str) else (module, None)
                if argument in text:
                    continue
                if module in elsewhere and place not in ours:
                    place = (elsewhere[module], None)
                assert place in ours, f"{name}: {module}.{argument}"
                seen += 1
    assert seen >= 8
