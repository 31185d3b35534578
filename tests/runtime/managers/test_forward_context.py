import threading

import pytest
import torch

from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    TensorCache,
    TextSpan,
    current_forward_context,
    get_forward_context,
    set_forward_context,
    use_forward_context,
)


def test_there_is_no_context_outside_a_denoiser_call():
    assert current_forward_context() is None
    with pytest.raises(RuntimeError, match=r"no forward context is set; run the denoiser inside"):
        get_forward_context()


def test_the_context_carries_what_is_known_and_ends_with_the_block():
    metadata, request = object(), object()
    known = {
        "timestep": 999.0,
        "num_steps": 4,
        "latent_grid": (2, 3, 5),
        "text_span": TextSpan(start=30, length=7),
        "cfg_branch": "cond",
        "component": "transformer_2",
        "request_id": "r1",
    }
    with set_forward_context(3, metadata, request, **known) as context:
        assert get_forward_context() is context is current_forward_context()
        assert context.current_timestep == 3
        assert context.attn_metadata is metadata
        assert context.forward_batch is request
        assert {name: getattr(context, name) for name in known} == known
        assert context.text_span.stop == 37
    assert current_forward_context() is None


def test_nested_calls_see_their_own_context_and_restore_the_outer_one():
    with set_forward_context(1) as outer:
        with set_forward_context(2):
            assert get_forward_context().current_timestep == 2
            with use_forward_context(None):
                assert current_forward_context() is None
            assert get_forward_context().current_timestep == 2
        assert get_forward_context() is outer


def test_an_exception_ends_the_context():
    with pytest.raises(KeyError, match=r"inside"), set_forward_context(1):
        raise KeyError("inside")
    assert current_forward_context() is None


def test_each_call_has_a_cache_of_its_own():
    mask = torch.ones(2)
    with set_forward_context(0) as first:
        assert first.cache.get(mask, "a use", lambda: 1) == 1
        assert first.cache.get(mask, "a use", lambda: 2) == 1
    with set_forward_context(0) as second:
        assert second.cache.get(mask, "a use", lambda: 3) == 3


def test_what_is_derived_from_a_tensor_is_kept_by_tensor_version_and_use():
    cache, mask = TensorCache(), torch.ones(2)
    assert cache.get(mask, "sum", lambda: mask.sum().item()) == 2
    assert cache.get(mask, "first", lambda: mask[0].item()) == 1
    mask.zero_()
    assert cache.get(mask, "sum", lambda: mask.sum().item()) == 0
    for value in range(8):  # each freed at once, were it not held
        assert cache.get(torch.full((1,), value), "sum", lambda value=value: value) == value


def test_a_field_that_does_not_exist_is_refused():
    with (
        pytest.raises(TypeError, match=r"unexpected keyword argument 'latent_gird'"),
        set_forward_context(0, latent_gird=(1, 1, 1)),
    ):
        pass


def test_a_context_cannot_be_changed():
    with pytest.raises(AttributeError, match=r"cannot assign to field"):
        ForwardContext(current_timestep=0).current_timestep = 1


@pytest.mark.parametrize(
    ("step", "num_steps", "last"), [(2, 4, False), (3, 4, True), (0, 1, True), (3, None, False)]
)
def test_a_step_is_the_last_where_that_is_known(step, num_steps, last):
    context = ForwardContext(current_timestep=step, num_steps=num_steps)
    assert context.is_last_step is last


def test_threads_do_not_see_each_others_context():
    seen: dict[int, tuple[object, int]] = {}
    meet = threading.Barrier(2)

    def denoise(step: int) -> None:
        before = current_forward_context()
        with set_forward_context(step):
            meet.wait(timeout=60)
            seen[step] = before, get_forward_context().current_timestep
            meet.wait(timeout=60)

    with set_forward_context(99):
        threads = [threading.Thread(target=denoise, args=(step,)) for step in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert get_forward_context().current_timestep == 99
    assert seen == {1: (None, 1), 2: (None, 2)}
