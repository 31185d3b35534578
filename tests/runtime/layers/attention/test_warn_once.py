"""What is said to somebody whose settings leave no step or no layer sparse."""

import logging
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest

from multimodal_gen.runtime.layers.attention import warn_once as warn_once_module
from multimodal_gen.runtime.layers.attention.config import SparseConfig, build_config
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce

NAME = "sparse_video_gen_2_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(SparseConfig):
    """A method whose first steps and layers stay dense: a share up to 1, a number above."""

    first_dense_steps: ClassVar[str] = "first"
    first_dense_layers: ClassVar[str] = "first_layers"

    first: float = 0.0
    first_layers: float = 0.0


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture):
    """Return a function that asks for the notice and returns what was said so far."""
    said = WarnOnce()

    def ask(num: int | None, axis: str = "steps", **parameters: object) -> list[str]:
        reason = build_config(Config, parameters, backend=NAME).never_sparse(axis, num)
        with caplog.at_level(logging.WARNING, logger=warn_once_module.__name__):
            if reason is not None:
                said.warn(f"{NAME} {reason}")
        return [record.getMessage() for record in caplog.records]

    return ask


@pytest.mark.parametrize(
    ("num_steps", "parameters", "given"),
    [
        (4, {"first": 1}, "first=1.0 keep"),
        (4, {"first": 4}, "first=4.0 keep"),
        (1, {"dense_steps": "0"}, "dense_steps=0 keep"),
        (4, {"first": 0.5, "dense_steps": "2-3"}, "first=0.5 and dense_steps=2-3 keep"),
    ],
)
def test_a_run_without_a_sparse_step_is_told_of_once(told, num_steps, parameters, given) -> None:
    told(num_steps, **parameters)
    (message,) = told(num_steps, **parameters)
    assert message.startswith(f"{NAME} is sparse in no step: {given} all {num_steps} steps")


@pytest.mark.parametrize(
    ("num_steps", "parameters"),
    [
        (None, {"first": 1}),
        (4, {}),
        (4, {"first": 3}),
        (4, {"first": 0.99}),
        (4, {"first": 2, "dense_steps": "3"}),
    ],
)
def test_nothing_is_said_where_a_step_is_sparse_or_their_number_unknown(
    told, num_steps, parameters
) -> None:
    assert told(num_steps, **parameters) == []


@pytest.mark.parametrize(
    ("num_layers", "parameters", "given"),
    [
        (4, {"first_layers": 1}, "first_layers=1.0 keep"),
        (4, {"first_layers": 100}, "first_layers=100.0 keep"),
        (4, {"first_layers": 3, "dense_layers": "3-"}, "first_layers=3.0 and dense_layers=3- keep"),
    ],
)
def test_a_model_without_a_sparse_layer_is_told_of_once(told, num_layers, parameters, given):
    told(num_layers, "layers", **parameters)
    (message,) = told(num_layers, "layers", **parameters)
    assert message.startswith(f"{NAME} is sparse in no layer: {given} all {num_layers} layers")


@pytest.mark.parametrize(
    ("num_layers", "parameters"),
    [(None, {"first_layers": 1}), (4, {"first_layers": 3}), (4, {"first": 1})],
)
def test_nothing_is_said_where_a_layer_is_sparse_or_their_number_unknown(
    told, num_layers, parameters
) -> None:
    assert told(num_layers, "layers", **parameters) == []


def test_a_copy_of_what_was_said_is_not_said_again(caplog) -> None:
    said = WarnOnce()
    said.warn("so it is")
    pickle.loads(pickle.dumps(said)).warn("so it is")
    WarnOnce().warn("so it is")
    assert [record.getMessage() for record in caplog.records] == ["so it is"] * 2
