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
    branch_parts,
    find_searches,
    record_into,
    search_name,
    session_for,
)
from multimodal_gen.runtime.managers.generation import Generation, describe_generation

TILES = (3, 2, 4)


@pytest.fixture(autouse=True)
def _no_sessions() -> None:
    search_module._SESSIONS.clear()


def _run(folder, request: str, branch: str, steps: int = 2, layers: int = 2) -> None:
    """Record a generation as its layers do, each asking for the session by itself."""
    for step in range(steps):
        for layer in range(layers):
            session = session_for(str(folder), request)
            windows = session.recorder.candidates(TILES)
            losses = torch.full((len(windows), 2, 3), float(step))
            session.recorder.add(losses, step=step, layer=layer, branch=branch)
            session.finish(branch, steps, (6, 8, 16), (2, 4, 4))


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
    assert found.losses.l2[0, :, 1, 2].tolist() == [0.0, 1.0]


def test_files_are_named_by_the_prompt_and_one_generated_again_replaces_its_own(tmp_path) -> None:
    for request in ("request-a", "request-b"):
        with describe_generation(Generation(prompt="a fox", width=96, height=64)):
            _run(tmp_path, request, POSITIVE)
    (file,) = find_searches(tmp_path, POSITIVE)
    assert file.name == search_name("a fox")
    assert file.parent.name == "mask_search_result_pos_96x64"
    assert SearchFile.read(file).settings["prompt"] == "a fox"


def test_a_session_leaves_when_all_its_branches_are_complete(tmp_path) -> None:
    losses = [weakref.ref(loss) for loss in _run_both(tmp_path, "request-a", last=(POSITIVE,))]
    assert any(ref() is not None for ref in losses)  # the negative branch goes on
    _call(tmp_path, "request-a", 1, NEGATIVE)
    gc.collect()
    assert all(ref() is None for ref in losses)
    assert list(search_module._SESSIONS) == []


def test_a_second_call_of_the_last_step_counts_too(tmp_path) -> None:
    for step, value in ((0, 1.0), (0, 3.0), (1, 1.0), (1, 5.0)):
        _call(tmp_path, "request-a", step, POSITIVE, value)
    (file,) = find_searches(tmp_path, POSITIVE)
    assert SearchFile.read(file).losses.l2[0, :, 0, 0].tolist() == [2.0, 3.0]
    assert list(search_module._SESSIONS) == []


def test_of_unfinished_sessions_only_the_latest_stay(tmp_path) -> None:
    for i in range(9):
        _call(tmp_path, f"request-{i}", 0, POSITIVE)
    kept = [request for _, request in search_module._SESSIONS]
    assert kept == [f"request-{i}" for i in range(9 - search_module._MOST_SESSIONS, 9)]


def _call(folder, request: str, step: int, branch: str, value: float = 1.0) -> torch.Tensor:
    """Record a call of the only layer in a run of two steps."""
    session = session_for(str(folder), request)
    losses = torch.full((len(session.recorder.candidates(TILES)), 2, 3), value)
    session.recorder.add(losses, step=step, layer=0, branch=branch)
    session.finish(branch, 2, (6, 8, 16), (2, 4, 4))
    return losses


def _run_both(folder, request: str, *, last: tuple[str, ...]) -> list[torch.Tensor]:
    calls = [(0, POSITIVE), (0, NEGATIVE), *((1, branch) for branch in last)]
    return [_call(folder, request, step, branch) for step, branch in calls]


def test_an_unfinished_generation_leaves_no_file(tmp_path) -> None:
    session = session_for(str(tmp_path), "unfinished")
    losses = torch.zeros(len(session.recorder.candidates(TILES)), 2, 3)
    session.recorder.add(losses, step=0, layer=0, branch=POSITIVE)
    session.finish(POSITIVE, 2, (6, 8, 16), (2, 4, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_in_use_gathers_and_nothing_is_written(tmp_path) -> None:
    recorder = LossRecorder()
    with record_into(recorder):
        _run(tmp_path, "request-c", POSITIVE)
    assert list(tmp_path.iterdir()) == []
    assert recorder.losses()[POSITIVE].l2.shape[1:] == (2, 2, 3)


def test_a_model_alone_cannot_tell_when_it_is_done(tmp_path) -> None:
    with pytest.raises(UsageError, match="whose number of steps is known, got a model alone"):
        session_for(str(tmp_path), None).finish(POSITIVE, None, TILES, TILES)


@pytest.mark.parametrize(
    ("name", "branches"),
    [("cond", [POSITIVE]), ("uncond", [NEGATIVE]), (None, [POSITIVE])],
)
def test_a_call_of_one_branch_belongs_to_it(name, branches) -> None:
    out, full = torch.rand(2, 3, 4, 5, 6)
    ((branch, part, whole),) = branch_parts(name, out, full)
    assert [branch] == branches
    assert part is out
    assert whole is full


def test_a_batch_of_both_branches_has_the_negative_half_first() -> None:
    out, full = torch.rand(2, 4, 4, 5, 6)
    parts = branch_parts("both", out, full)
    assert [branch for branch, _, _ in parts] == [NEGATIVE, POSITIVE]
    assert torch.equal(torch.cat([part for _, part, _ in parts]), out)
    assert torch.equal(torch.cat([whole for _, _, whole in parts]), full)
