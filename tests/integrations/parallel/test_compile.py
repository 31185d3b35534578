"""Compiled denoisers over ranks: blocks on their own, and whole models."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.denoisers import DENOISERS

TOLERANCE = 1e-4


def predict(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def compiled(name, how):
    """Return the outputs of one process and of compiled ranks, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    model, inputs = DENOISERS[name].make()
    later = {**inputs, "timestep": inputs["timestep"] / 2}
    with use_parallel_groups(None), apply(model):
        want = [predict(model, x) for x in (inputs, later)]
    with apply(model):
        if how == "blocks":
            model.compile_repeated_blocks(fullgraph=True, backend="eager")
            call = model
        else:
            call = torch.compile(model, fullgraph=True, backend="eager")
        got = [predict(call, inputs)]
        first = counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("fail_on_recompile"):
            got.append(predict(call, later))
    torch._dynamo.reset()
    return want, got, first


@pytest.mark.slow_cases("qwen with two images-blocks-2", "wan-blocks-1", "wan-whole-1")
@pytest.mark.parametrize(
    ("name", "how", "graphs"),
    [
        ("wan", "blocks", 1),
        # One graph is the cut of what a compiled embedder returns, or of what tells images apart.
        pytest.param("hunyuan with different padding", "blocks", 5, marks=pytest.mark.slow),
        ("qwen with two images", "blocks", 2),
        ("wan", "whole", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_ranks_give_the_output_of_one_process(two_ranks, name, how, graphs):
    for want, got, first in two_ranks.run(Mesh(ulysses=2), compiled, name, how):
        for ours, theirs in zip(got, want, strict=True):
            assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
        assert first == graphs
