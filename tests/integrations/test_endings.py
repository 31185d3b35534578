"""The end of a pipeline's call, and what a pipeline and its copies keep of who waits for it."""

import copy
import pickle
from contextlib import ExitStack

import pytest

from multimodal_gen.integrations.endings import EndOfCall, notice_end


class Pipeline:
    """A pipeline that ends its calls as those of diffusers do."""

    def __init__(self):
        self.freed = 0

    def __call__(self):
        self.maybe_free_model_hooks()

    def maybe_free_model_hooks(self):
        self.freed += 1


class OtherPipeline:
    """A pipeline of another library."""


def test_the_end_of_a_call_is_noticed_until_that_is_taken_back():
    pipe, ended = Pipeline(), []
    with ExitStack() as undo:
        notice_end(pipe, lambda: ended.append(pipe.freed), undo)
        pipe()
        pipe()
    assert vars(pipe) == {"freed": 2}
    pipe()
    assert (ended, pipe.freed) == ([0, 1], 3)


def ended_in_vain():
    raise AssertionError("a copy said that its call ended")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_pipeline_does_what_its_class_does_and_can_be_waited_for(copied):
    with ExitStack() as undo:
        pipe = Pipeline()
        notice_end(pipe, ended_in_vain, undo)
        twin = copied(pipe)
    twin()
    assert (twin.freed, pipe.freed) == (1, 0)
    ended = []
    with ExitStack() as undo:
        notice_end(twin, lambda: ended.append(True), undo)
        twin()
    assert ended == [True]


def test_what_somebody_else_put_there_stays():
    pipe = Pipeline()
    pipe.maybe_free_model_hooks = own = list
    with ExitStack() as undo:
        notice_end(pipe, ended_in_vain, undo)
        assert pipe.maybe_free_model_hooks is own
    assert pipe.maybe_free_model_hooks is own


@pytest.mark.parametrize("pipe", [None, OtherPipeline()])
def test_pipelines_that_do_not_tell_are_left_alone(pipe):
    with ExitStack() as undo:
        notice_end(pipe, ended_in_vain, undo)
        assert not any(isinstance(x, EndOfCall) for x in getattr(pipe, "__dict__", {}).values())
