"""What `multimodal_gen.compare` refuses before anything runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import multimodal_gen
from multimodal_gen.errors import UsageError
from multimodal_gen.integrations import comparison
from multimodal_gen.runtime.comparison import run

PIPE = SimpleNamespace(components={})


def compare(tmp_path: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"prompts": "a fox", "backends": "fa", "output": tmp_path / "out"}
    return multimodal_gen.compare(PIPE, **{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replayed_steps": -2}, "replayed_steps must be a whole number from 0, or None, got -2"),
        ({"replayed_steps": True}, "replayed_steps must be a whole number from 0, .* got True"),
        ({"layers_for": 0}, "layers_for must be a whole number from 1, or None, got 0"),
        ({"layers_for": -3}, "layers_for must be a whole number from 1, or None, got -3"),
        ({"seeds": 5}, "seeds must be a list of whole numbers from 0, .* got 5"),
        ({"seeds": "0-3"}, "seeds must be a list of whole numbers from 0, .* got '0-3'"),
        ({"seeds": [0, -1]}, r"seeds must be a list of whole numbers from 0, .* got \[0, -1\]"),
        ({"seeds": [0.5]}, r"seeds must be a list of whole numbers from 0, .* got \[0.5\]"),
        ({"seeds": []}, "at least one prompt and one seed"),
        ({"prompts": None}, "prompts must be a text or a list of texts, got None"),
        ({"prompts": ["a", 3]}, r"prompts must be a text or a list of texts, got \['a', 3\]"),
        ({"backends": 5}, "backends must be a text or a list of texts, got 5"),
        ({"floor": 5}, "floor must be a text or a list of texts, got 5"),
        ({"floor": False}, "floor must be a text or a list of texts, got False"),
        ({"reference": None}, "reference must be text such as 'torch_sdpa', got None"),
        ({"score": 3}, "score must be a function or FILE.py:function, got 3"),
        ({"score": "score"}, "score must be FILE.py:function, got 'score'"),
        ({"score": len}, r"score must be a function of a clip \[T, H, W, 3\] and its prompt, got"),
        ({"say": 3}, "say must be a function of a line, got 3"),
        ({"resume": "no"}, "resume must be True or False, got 'no'"),
        ({"perceptual": 0}, "perceptual must be True or False, got 0"),
        ({"page": None}, "page must be True or False, got None"),
        ({"output": None}, "output must be the path of a folder, got None"),
        ({"output": ""}, "output must be the path of a folder, got ''"),
    ],
)
def test_what_cannot_be_is_one_clear_error(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_comparison_on_several_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "parallel_groups", object)
    with pytest.raises(
        UsageError, match=r"on one GPU, got several; .* `sglang generate --num-gpus"
    ):
        compare(tmp_path, page=False)
    assert not list(tmp_path.iterdir())


def test_what_can_be_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(
        comparison, "run_plan", lambda pipe, index, args, plan, **_: plans.append(plan)
    )
    compare(tmp_path, seeds=np.arange(2), prompts=("a fox", "a fox"), replayed_steps=0)
    compare(tmp_path, seeds=range(3), backends=["fa"], layers_for=1, output=str(tmp_path))
    assert [plan.seeds for plan in plans] == [(0, 1), (0, 1, 2)]
    assert [type(seed) for seed in plans[0].seeds] == [int, int]
    assert [(plan.replayed_steps, plan.layers_for) for plan in plans] == [(0, None), (None, 1)]
    assert plans[0].prompts == ("a fox",)
