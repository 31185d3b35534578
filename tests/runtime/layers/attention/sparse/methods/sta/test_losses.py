import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    LossRecorder,
    candidates,
    head_losses,
    record_into,
    recorder_for,
)

WINDOWS = ((1, 1, 1), (3, 1, 1))


def recorder_of() -> LossRecorder:
    recorder = LossRecorder(WINDOWS)
    assert recorder.candidates((5, 1, 1)) == WINDOWS
    return recorder


def test_losses_are_means_over_everything_but_heads() -> None:
    torch.manual_seed(0)
    out, full = torch.randn(2, 2, 7, 3, 4, dtype=torch.float64).half()
    difference = out.double() - full.double()
    expected = torch.stack(
        (difference.pow(2).mean((0, 1, 3)), difference.abs().mean((0, 1, 3)))
    ).float()
    torch.testing.assert_close(head_losses(out, full), expected, rtol=1e-5, atol=0)


def test_losses_are_ordered_by_candidate_step_layer_and_head() -> None:
    recorder = recorder_of()
    for step in (1, 0):
        for layer in (0, 1, 2):
            values = torch.arange(8.0).view(2, 2, 2) + 100 * step + 10 * layer
            recorder.add(values, step=step, layer=layer, branch=POSITIVE)
    found = recorder.losses()[POSITIVE]
    assert found.windows == WINDOWS
    assert found.l2.shape == found.l1.shape == (2, 2, 3, 2)
    assert found.l2[1, 1, 2].tolist() == [124.0, 125.0]
    assert found.l1[1, 1, 2].tolist() == [126.0, 127.0]


def test_branches_are_kept_apart_and_repeated_calls_averaged() -> None:
    recorder = recorder_of()
    for branch, value in ((POSITIVE, 1.0), (NEGATIVE, 5.0), (POSITIVE, 2.0)):
        losses = torch.full((2, 2, 3), value)
        recorder.add(losses, step=0, layer=0, branch=branch)
    found = recorder.losses()
    assert found[POSITIVE].l2.unique().tolist() == [1.5]
    assert found[NEGATIVE].l1.unique().tolist() == [5.0]


def test_a_search_is_complete_when_the_last_step_has_all_layers(tmp_path) -> None:
    recorder = LossRecorder(WINDOWS, tmp_path)
    recorder.candidates((5, 1, 1))
    seen = []
    for step in range(2):
        for layer in range(2):
            recorder.add(torch.zeros(2, 2, 1), step=step, layer=layer, branch=POSITIVE)
            for branch in (POSITIVE, NEGATIVE):
                recorder.finish(branch, 2, (5, 1, 1), (1, 1, 1))
            seen.append(len(list(tmp_path.iterdir())))
    assert seen == [0, 0, 0, 1]


def test_a_layer_that_was_skipped_is_named() -> None:
    recorder = recorder_of()
    for step, layer in ((0, 0), (0, 1), (1, 0)):
        recorder.add(torch.zeros(2, 2, 1), step=step, layer=layer, branch=POSITIVE)
    with pytest.raises(UsageError, match="3 of 2 steps x 2 layers; first missing: step 1, layer 1"):
        recorder.losses()


def test_a_search_that_reached_no_layer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must reach at least one attention layer .*, got none"):
        LossRecorder().losses()


def test_another_grid_within_a_search_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got \(4, 1, 1\) tiles after \(5, 1, 1\)"):
        recorder_of().candidates((4, 1, 1))


def test_candidates_suit_the_grid_unless_given() -> None:
    assert LossRecorder().candidates((5, 6, 10)) == candidates((5, 6, 10))


def test_a_recorder_is_current_inside_its_block_only() -> None:
    recorder = LossRecorder()
    with record_into(recorder):
        assert recorder_for("searches", "a") is recorder
    assert recorder_for("searches", "a") is not recorder
