"""What PISA has of its own, against its definition written down token by token."""

from multimodal_gen.runtime.layers.attention.sparse.methods.pisa import PisaConfig
from tests.helpers.methods import DEFINED

PISA = DEFINED["pisa"]


def test_without_the_first_order_means_are_what_is_left():
    PISA.check(tail="pooled", first_order=False)
    assert (PisaConfig().tail, PisaConfig().first_order) == ("pooled", True)
