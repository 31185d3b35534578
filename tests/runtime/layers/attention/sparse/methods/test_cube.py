"""What cube sparse attention has of its own, against its definition, one cube at a time."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.methods import DEFINED, Defined, best, drawn_call, picks, tiles
from tests.helpers.sparse import run_sparse, tokens_of_tiles

CUBE = DEFINED["cube"]


def drawn(seed: int) -> tuple[Defined, Mapping[str, Any]]:
    """Return a case: a grid of some cubes, a ratio, text, samples, key heads and a mask."""
    pick = picks(seed)
    cube, ratio = (pick(1, 3), pick(1, 4), pick(2, 5)), pick(1, 19) / 20
    grid = (pick(2, 6), pick(3, 8), pick(4, 9))
    kept = max(1, math.floor(Fraction(str(ratio)) * len(tokens_of_tiles(grid, cube))))
    given = {**CUBE.method.given, "local_cube_size": list(cube), "topk_ratio": ratio}
    case = replace(
        CUBE,
        method=replace(CUBE.method, given=given),
        cut=tiles(*cube),
        choose=partial(best, kept=kept, own=True),
        grid=grid,
        varied=tiles(*cube),
    )
    return case, drawn_call(case, pick, without=slice(None))


def listed(*ratios: float):
    """Return a layer with a ratio for every step."""
    return CUBE.method.layer(kv_heads=1, topk_ratio=..., topk_ratio_list=list(ratios))


def check(layer, step, kept, num_steps):
    CUBE.check(layer=layer, step=step, rule={"kept": kept}, known={"num_steps": num_steps})


def test_every_step_has_a_ratio_of_its_own_and_those_of_1_are_dense():
    layer = listed(1.0, 0.5, 0.01)
    for step, kept in enumerate((18, 9, 1)):
        check(layer, step, kept, 3)
    dense, sparse = layer.report().entries
    assert dense.steps == "0"
    assert "topk_ratio_list of 1" in dense.selection.reason
    assert [step for step, _ in sparse.densities] == [1, 2]


def test_a_step_keeps_its_ratio_however_often_the_model_is_called():
    # As it is twice, where the branches of guidance are calls of their own.
    layer = listed(0.5, 0.1)
    for step, kept in ((0, 9), (0, 9), (1, 1), (1, 1)):
        check(layer, step, kept, 2)


def test_a_list_for_another_number_of_steps_is_refused():
    layer = listed(0.5, 0.5)
    wanted = "`topk_ratio_list` of cube_sparse_attn must have one ratio for each of the run's 3"
    with set_forward_context(0, latent_grid=CUBE.grid, num_steps=3) as context:
        for route in layer.schedule():
            with pytest.raises(ConfigError, match=wanted):
                route.check_run(context)
    with pytest.raises(ConfigError, match="must have a ratio for step 2, got 2 ratios"):
        run_sparse(layer, CUBE.inputs(), CUBE.grid, step=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topk_ratio_list": [0.5]}, "`topk_ratio` of cube_sparse_attn must not be given wi"),
        (
            {"topk_ratio": ..., "topk_ratio_list": []},
            "must have one ratio for every step, got none",
        ),
    ],
)
def test_a_ratio_is_given_once(given, message):
    with pytest.raises(ConfigError, match=message):
        CUBE.method.config(**given)
