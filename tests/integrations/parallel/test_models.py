"""Denoisers whose tokens are split over two ranks, against one process."""

import pytest
import torch

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import (
    SequenceParallelLayer,
)
from tests.helpers.denoisers import COMMON, SPLIT

SPLIT_CASES = {**COMMON, **SPLIT}


def flat(output):
    """Return all that a model gives, images in lists and sound too, as one row."""
    if isinstance(output, torch.Tensor):
        return output.flatten()
    return torch.cat([flat(each) for each in output if each is not None])


def run(name):
    """Return the outputs of one process and of the ranks, and how many tokens layers had."""
    model, inputs = SPLIT_CASES[name].make()
    with use_parallel_groups(None), apply(model), torch.no_grad():
        want = flat(model(**inputs, return_dict=False))
    tokens = []
    attend = SequenceParallelLayer._attend_over_ranks

    def record(self, call, groups):
        tokens.append(call.query.shape[1] - sum(call.replicated[:2]))
        return attend(self, call, groups)

    SequenceParallelLayer._attend_over_ranks = record
    try:
        with apply(model) as handle, torch.no_grad():
            got = flat(model(**inputs, return_dict=False))
            report = handle.report()
    finally:
        SequenceParallelLayer._attend_over_ranks = attend
    return want, got, tokens, report


@pytest.mark.slow_cases(
    "ring-flux 3",
    "ring-hunyuan 1.5 with an image",
    "ring-hunyuan 1.5 with padding",
    "ring-hunyuan image with padding",
    "ring-hunyuan image without glyphs",
    "ring-hunyuan image",
    "ring-kandinsky 5",
    "ring-kandinsky 6 with sound",
    "ring-kandinsky 6",
    "ring-krea 2 with padding",
    "ring-krea 2",
    "ring-ltx 2",
    "ring-minimax h3",
    "ring-wan vace",
    "ring-z image whose caption is half as long",
    "ring-z image with captions of different lengths",
    "ulysses-hunyuan 1.5 with an image",
    "ulysses-hunyuan 1.5 with padding",
    "ulysses-hunyuan image with padding",
    "ulysses-hunyuan image without glyphs",
    "ulysses-hunyuan image",
    "ulysses-kandinsky 6",
    "ulysses-krea 2",
    "ulysses-ltx 2",
    "ulysses-minimax h3",
    "ulysses-z image",
)
@pytest.mark.parametrize("name", SPLIT_CASES)
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
def test_ranks_that_share_the_tokens_give_the_output_of_one(two_ranks, name, mesh):
    results = two_ranks.run(mesh, run, name)
    for want, got, _, report in results:
        notes = report.notes
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
        assert notes[-1].startswith("transformer: 2 ranks share the sequence")
        assert report.times.communication_ms > report.gathering.communication_ms > 0
        assert report.times.attention_ms > 0
        assert "s of it around the denoiser" in report.summary()
    assert torch.equal(results[0][1], results[1][1])
    (first,), (second,) = (set(tokens) for _, _, tokens, _ in results)
    assert first - second in (0, 1)
