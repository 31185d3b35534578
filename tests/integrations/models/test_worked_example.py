"""The adapter that the guide to transformers shows, on a model of diffusers."""

import inspect
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.models import registry, skyreels_v2
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.architecture.test_docs import REPOSITORY, blocks
from tests.helpers.denoisers import SPLIT

GUIDE = Path("docs/pages/contributing/transformer.md")


def without_it(patch):
    """Take the adapter away."""
    others = {n: a for n, a in registry.ADAPTERS.items() if a is not skyreels_v2.SKYREELS_V2}
    patch.setattr(registry, "ADAPTERS", others)


def test_the_guide_shows_the_adapter_as_it_is():
    (code,) = blocks((REPOSITORY / GUIDE).read_text(), "python")
    assert inspect.getsource(skyreels_v2).endswith(code)


def attend(model, inputs, **settings):
    """Return what the model gives, and the report."""
    with apply(model, **settings) as handle, torch.no_grad():
        return model(**inputs, return_dict=False)[0], handle.report()


def backends(report):
    return {e.selection.backend for layer in report.layers for e in layer.entries if layer.calls}


def test_it_knows_the_grid_that_sparse_backends_need():
    model, inputs = SPLIT["skyreels v2"].make()
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
    with pytest.MonkeyPatch.context() as patch:
        without_it(patch)
        dense, report = attend(model, inputs, attention_backend="video_sparse_attn")
    assert "has no adapter, its latent grid is unknown" in " ".join(report.notes)
    assert AttentionBackendEnum.VIDEO_SPARSE_ATTN not in backends(report)
    assert (dense - stock).abs().max() <= 1e-5
    sparse, report = attend(
        model,
        inputs,
        attention_backend="video_sparse_attn",
        attention_backend_config={"sparsity": 0.5},
    )
    assert not report.notes
    assert AttentionBackendEnum.VIDEO_SPARSE_ATTN in backends(report)
    assert sparse.shape == stock.shape


def alone_and_shared(forcing):
    """Return the outputs of one process and of the ranks; of the latter, the error if any."""
    model, inputs = SPLIT["skyreels v2"].make()
    with use_parallel_groups(None):
        want, _ = attend(model, inputs)
    try:
        got, report = attend(model, {**inputs, "enable_diffusion_forcing": forcing})
    except UsageError as error:
        return want, str(error), ()
    return want, got, report.notes


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
def test_ranks_that_share_its_tokens_give_the_output_of_one(two_ranks, mesh):
    for want, got, notes in two_ranks.run(mesh, alone_and_shared, False):
        assert notes[-1].startswith("transformer: 2 ranks share the sequence")
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_what_it_cannot_split_it_refuses(two_ranks):
    for _, error, _ in two_ranks.run(Mesh(ulysses=2), alone_and_shared, True):
        assert error.startswith("enable_diffusion_forcing must be False where ranks share")
