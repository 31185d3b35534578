"""What PISA has of its own, against its definition written down token by token."""

import torch

from multimodal_gen.runtime.layers.attention.sparse.methods.pisa import PisaConfig
from tests.helpers.methods import DEFINED
from tests.helpers.reference import reference_attention

PISA = DEFINED["pisa"]


def test_without_the_first_order_means_are_what_is_left():
    PISA.check(tail="pooled", first_order=False)
    assert (PisaConfig().tail, PisaConfig().first_order) == ("pooled", True)


def test_with_every_block_it_is_dense_attention():
    qkv = PISA.inputs()
    _, out, _ = PISA.check(qkv=qkv, rule={"kept": 10}, density=1.0, tail="pooled")
    exact, _ = reference_attention(*qkv, scale=PISA.scale)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
