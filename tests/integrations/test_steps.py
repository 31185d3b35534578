from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.integrations.steps import StepTracker


def tracker_of(timesteps, **attributes):
    scheduler = SimpleNamespace(timesteps=timesteps, **attributes)
    return StepTracker(lambda: scheduler), scheduler


def indices(tracker, values, dtype=torch.float32, scale=1.0):
    return [tracker.locate(value, dtype, scale).index for value in values]


def test_a_step_is_where_its_timestep_sits_in_the_schedule():
    tracker, _ = tracker_of(torch.tensor([999.0, 800.5, 400.25, 100.125]))
    values = [999.0, 999.0, 800.5, 100.125, 100.125]
    assert indices(tracker, values) == [0, 0, 1, 3, 3]
    assert tracker.locate(100.125, torch.float32).num_steps == 4


def test_integer_timesteps_match_exactly():
    tracker, _ = tracker_of(torch.tensor([3, 2, 1]))
    assert indices(tracker, [3, 2, 1], torch.int64) == [0, 1, 2]


def test_a_scaled_timestep_is_found():
    tracker, _ = tracker_of(torch.tensor([1000.0, 750.0, 500.0]))
    assert indices(tracker, [1.0, 0.75, 0.5], scale=1e-3) == [0, 1, 2]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rounding_to_16_bits_is_undone_by_the_schedulers_own_index(scale):
    timesteps = torch.linspace(1000, 900, 50)
    tracker, scheduler = tracker_of(timesteps)
    rounded = (timesteps.to(torch.bfloat16) * scale).to(torch.bfloat16)
    assert len(rounded.unique()) < 45
    found = []
    for index, value in enumerate(rounded.tolist()):
        # A scheduler has no index before its first step, and the next one after each step.
        scheduler.step_index = index or None
        found.append(tracker.locate(value, torch.bfloat16, scale).index)
    assert found == list(range(50))


def test_repeated_timesteps_are_told_apart_by_the_schedulers_own_index():
    tracker, scheduler = tracker_of(torch.tensor([900.0, 600.0, 600.0, 300.0, 300.0]))
    found = []
    for index in range(5):
        scheduler.step_index = index or None
        value = scheduler.timesteps[index].item()
        found += indices(tracker, [value, value])
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_repeated_timesteps_never_run_backwards_without_an_index():
    tracker, _ = tracker_of(torch.tensor([900.0, 600.0, 600.0, 300.0]))
    assert indices(tracker, [900.0, 600.0, 600.0, 300.0]) == [0, 1, 1, 3]


def test_a_stale_index_of_the_scheduler_is_not_believed():
    tracker, _ = tracker_of(torch.tensor([900.0, 600.0, 300.0]), step_index=0)
    assert indices(tracker, [900.0, 600.0, 300.0]) == [0, 1, 2]


def test_steps_count_from_where_a_partial_schedule_begins():
    tracker, _ = tracker_of(torch.tensor([900.0, 600.0, 300.0, 100.0]), begin_index=2)
    step = tracker.locate(300.0, torch.float32)
    assert (step.index, step.num_steps) == (0, 2)
    assert tracker.locate(100.0, torch.float32).index == 1


def test_a_new_schedule_is_a_new_request():
    tracker, scheduler = tracker_of(torch.tensor([900.0, 300.0]))
    first = {tracker.locate(value, torch.float32).request_id for value in (900.0, 300.0)}
    scheduler.timesteps = torch.tensor([900.0, 300.0])
    second = {tracker.locate(value, torch.float32).request_id for value in (900.0, 300.0)}
    assert len(first) == len(second) == 1
    assert first != second


def test_going_back_to_an_earlier_step_is_a_new_request():
    tracker, _ = tracker_of(torch.tensor([900.0, 300.0]))
    steps = [tracker.locate(value, torch.float32) for value in (900.0, 300.0, 900.0)]
    assert [step.index for step in steps] == [0, 1, 0]
    assert steps[0].request_id == steps[1].request_id != steps[2].request_id


def test_without_a_schedule_changes_of_the_timestep_are_counted():
    tracker = StepTracker()
    steps = [tracker.locate(value, torch.float32) for value in (9.0, 9.0, 5.0, 5.0, 1.0)]
    assert [step.index for step in steps] == [0, 0, 1, 1, 2]
    assert {step.num_steps for step in steps} == {None}
    assert len({step.request_id for step in steps}) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_change_against_the_direction_starts_a_request(sign):
    tracker = StepTracker()
    values = [sign * value for value in (9.0, 5.0, 1.0, 9.0, 5.0)]
    steps = [tracker.locate(value, torch.float32) for value in values]
    assert [step.index for step in steps] == [0, 1, 2, 0, 1]
    assert steps[2].request_id != steps[3].request_id == steps[4].request_id


def test_a_timestep_outside_the_schedule_is_counted():
    tracker, _ = tracker_of(torch.tensor([900.0, 600.0]))
    assert indices(tracker, [512.0, 512.0, 256.0]) == [0, 0, 1]


def test_without_a_timestep_the_schedulers_own_index_counts():
    timesteps = torch.tensor([900.0, 600.0, 300.0])
    tracker, scheduler = tracker_of(timesteps, begin_index=1, step_index=None)
    assert tracker.has_index
    assert not StepTracker().has_index
    steps = []
    for scheduler.step_index in (None, 1, 2, 1):
        steps.append(tracker.locate_by_index())
    assert [step.index for step in steps] == [0, 0, 1, 0]
    assert {step.num_steps for step in steps} == {2}
    assert steps[1].request_id == steps[2].request_id != steps[3].request_id


def test_generations_that_end_are_told_of():
    tracker, scheduler = tracker_of(torch.tensor([900.0, 300.0]))
    ended = []
    tracker.when_ended.append(ended.append)
    tracker.end_request()
    first = tracker.locate(900.0, torch.float32).request_id
    tracker.locate(300.0, torch.float32)
    assert ended == []
    scheduler.timesteps = scheduler.timesteps.clone()
    second = tracker.locate(900.0, torch.float32).request_id
    assert ended == [first]
    tracker.end_request()
    assert ended == [first, second]
    # Saying so does not begin another one.
    assert tracker.locate(300.0, torch.float32).request_id == second
