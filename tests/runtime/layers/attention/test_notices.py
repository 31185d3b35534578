"""What is said to somebody whose settings leave no step sparse."""

import logging
from dataclasses import dataclass

import pytest

from multimodal_gen.runtime.layers.attention import notices
from multimodal_gen.runtime.layers.attention.config import SparseConfig, build_config
from multimodal_gen.runtime.layers.attention.notices import notice_dense_run
from multimodal_gen.runtime.platforms import AttentionBackendEnum

NAME = "sparse_video_gen_2_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(SparseConfig):
    """A method whose first steps stay dense: a share up to 1, a number above."""

    first: float = 0.0

    def dense_first(self) -> tuple[float, float]:
        """Return the first steps, and no layers."""
        return self.first, 0.0


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture):
    """Return a function that asks for the notice and returns what was said so far."""
    notices._warn_once.cache_clear()

    def ask(num_steps: int | None, **parameters: object) -> list[str]:
        config = build_config(Config, parameters, backend=NAME)
        with caplog.at_level(logging.WARNING, logger=notices.__name__):
            notice_dense_run(config, AttentionBackendEnum(NAME), num_steps, "first")
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
