"""Methods on drawn grids, with drawn parameters, text, samples, heads and masks."""

import pytest

from tests.runtime.layers.attention.sparse.methods import (
    test_bsa,
    test_cube,
    test_draft,
    test_nabla,
    test_static,
    test_vsa_h3,
)

DRAWN = {
    "cube": test_cube.drawn,
    "nabla": test_nabla.drawn,
    "draft": test_draft.drawn,
    "bsa": test_bsa.drawn,
    "vsa h3": test_vsa_h3.drawn,
    "static": test_static.drawn,
}


@pytest.mark.parametrize("some", range(10))
@pytest.mark.parametrize("method", DRAWN)
def test_drawn_cases_are_those_of_the_definition(method: str, some: int) -> None:
    for seed in range(10 * some, 10 * some + 10):
        case, given = DRAWN[method](seed)
        tail = "none" if seed % 3 else "pooled"
        case.check(**given, tail=tail)
        case.check_gradients(given["text"], tail=tail)
