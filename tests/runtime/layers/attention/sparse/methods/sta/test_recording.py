import gc
import weakref

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta import search as search_module
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    LossRecorder,
    SearchFile,
    branch_rows,
    find_searches,
    record_into,
    recorder_for,
    search_name,
)
from multimodal_gen.runtime.managers.generation import Generation, describe_generation

TILES = (3, 2, 4)


@pytest.fixture(autouse=True)
def _no_recorders() -> None:
    search_module._shared.cache_clear()


def _run(folder, request: str, branch: str, steps: int = 2, layers: int = 2) -> None:
    """Record a generation as its layers do, each asking for the recorder by itself."""
    for step in range(steps):
        for layer in range(layers):
            recorder = recorder_for(str(folder), request)
            windows = recorder.candidates(TILES)
            losses = torch.full((len(windows), 2, 3), float(step))
            recorder.add(losses, step=step, layer=layer, branch=branch)
            recorder.finish(branch, steps, (6, 8, 16), (2, 4, 4))


def test_a_generation_writes_its_file_when_its_last_layer_is_done(tmp_path) -> None:
    _run(tmp_path, "request-a", POSITIVE)
    _run(tmp_path, "request-a", NEGATIVE)
    _run(tmp_path, "request-b", POSITIVE)
    files = find_searches(tmp_path, POSITIVE)
    assert [file.name for file in files] == [
        "mask_search_request-a.json",
        "mask_search_request-b.json",
    ]
    assert files[0].parent.name == "mask_search_result_pos_16x8-tokens"
    assert len(find_searches(tmp_path, NEGATIVE)) == 1
    found = SearchFile.read(files[0])
    assert (found.tiles, found.tile_size) == (TILES, (2, 4, 4))
    assert found.l2[0, :, 1, 2].tolist() == [0.0, 1.0]


def test_files_are_named_by_the_prompt_and_one_generated_again_replaces_its_own(tmp_path) -> None:
    for request in ("request-a", "request-b"):
        with describe_generation(Generation(prompt="a fox", width=96, height=64)):
            _run(tmp_path, request, POSITIVE)
    (file,) = find_searches(tmp_path, POSITIVE)
    assert file.name == search_name("a fox")
    assert file.parent.name == "mask_search_result_pos_96x64"
    assert SearchFile.read(file).settings["prompt"] == "a fox"


def test_a_recorder_is_empty_when_all_its_branches_are_complete(tmp_path) -> None:
    losses = [weakref.ref(loss) for loss in _run_both(tmp_path, "request-a", last=(POSITIVE,))]
    assert any(ref() is not None for ref in losses)  # the negative branch goes on
    _call(tmp_path, "request-a", 1, NEGATIVE)
    gc.collect()
    assert all(ref() is None for ref in losses)
    assert not recorder_for(str(tmp_path), "request-a")._found


def test_a_second_call_of_the_last_step_counts_too(tmp_path) -> None:
    for step, value in ((0, 1.0), (0, 3.0), (1, 1.0), (1, 5.0)):
        _call(tmp_path, "request-a", step, POSITIVE, value)
    (file,) = find_searches(tmp_path, POSITIVE)
    assert SearchFile.read(file).l2[0, :, 0, 0].tolist() == [2.0, 3.0]
    assert not recorder_for(str(tmp_path), "request-a")._found


def test_of_unfinished_recorders_only_the_latest_stay(tmp_path) -> None:
    losses = [weakref.ref(_call(tmp_path, f"request-{i}", 0, POSITIVE)) for i in range(9)]
    gc.collect()
    most = search_module._shared.cache_info().maxsize
    assert [ref() is not None for ref in losses] == [False] * (9 - most) + [True] * most


def _call(folder, request: str, step: int, branch: str, value: float = 1.0) -> torch.Tensor:
    """Record a call of the only layer in a run of two steps."""
    recorder = recorder_for(str(folder), request)
    losses = torch.full((len(recorder.candidates(TILES)), 2, 3), value)
    recorder.add(losses, step=step, layer=0, branch=branch)
    recorder.finish(branch, 2, (6, 8, 16), (2, 4, 4))
    return losses


def _run_both(folder, request: str, *, last: tuple[str, ...]) -> list[torch.Tensor]:
    calls = [(0, POSITIVE), (0, NEGATIVE), *((1, branch) for branch in last)]
    return [_call(folder, request, step, branch) for step, branch in calls]


def test_an_unfinished_generation_leaves_no_file(tmp_path) -> None:
    recorder = recorder_for(str(tmp_path), "unfinished")
    losses = torch.zeros(len(recorder.candidates(TILES)), 2, 3)
    recorder.add(losses, step=0, layer=0, branch=POSITIVE)
    recorder.finish(POSITIVE, 2, (6, 8, 16), (2, 4, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_in_use_gathers_and_nothing_is_written(tmp_path) -> None:
    recorder = LossRecorder()
    with record_into(recorder):
        _run(tmp_path, "request-c", POSITIVE)
    assert list(tmp_path.iterdir()) == []
    assert recorder.losses()[POSITIVE].l2.shape[1:] == (2, 2, 3)


def test_a_model_alone_cannot_tell_when_it_is_done(tmp_path) -> None:
    with pytest.raises(UsageError, match="whose number of steps is known, got a model alone"):
        recorder_for(str(tmp_path), None).finish(POSITIVE, None, TILES, TILES)


@pytest.mark.parametrize(
    ("name", "branches"),
    [("cond", [POSITIVE]), ("uncond", [NEGATIVE]), (None, [POSITIVE])],
)
def test_a_call_of_one_branch_belongs_to_it(name, branches) -> None:
    out = torch.rand(3, 4, 5, 6)
    ((branch, rows),) = branch_rows(name, 3).items()
    assert [branch] == branches
    assert torch.equal(out[rows], out)


def test_a_batch_of_both_branches_has_the_negative_half_first() -> None:
    out = torch.rand(4, 4, 5, 6)
    rows = branch_rows("both", 4)
    assert list(rows) == [NEGATIVE, POSITIVE]
    assert torch.equal(torch.cat([out[part] for part in rows.values()]), out)
