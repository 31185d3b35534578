"""Drawn shapes of plans."""

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.helpers.block_plans import FORMS, PlanShape


def plan_shapes(
    *,
    q_size: Sequence[int],
    kv_size: Sequence[int],
    num_kv: int,
    num_q: int = 2,
    batch: Sequence[int] = (1, 2),
    heads: Sequence[int] = (1,),
    row_bits: bool = False,
) -> st.SearchStrategy[PlanShape]:
    """Return shapes of every form; `num_q` and `num_kv` are at most so many blocks."""
    return st.builds(
        PlanShape,
        batch=st.sampled_from(batch),
        heads=st.sampled_from(heads),
        num_q=st.integers(1, num_q),
        num_kv=st.integers(1, num_kv),
        q_size=st.sampled_from(q_size),
        kv_size=st.sampled_from(kv_size),
        q_form=st.sampled_from(FORMS),
        kv_form=st.sampled_from(FORMS),
        keep=st.sampled_from([0.0, 0.3, 1.0]),
        row_bits=st.booleans() if row_bits else st.just(False),
    )
