"""Rules that can never run anything are refused."""

import pytest

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError
from multimodal_gen.integrations.scopes import check_overrides
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from

SITES = [
    LayerSite(component=component, role=AttentionRole(role), layer=layer)
    for component, role in (("transformer", "self"), ("transformer", "cross"), ("te", "encoder"))
    for layer in range(3)
]


def check(*rules, **settings):
    rules = [{"backend": "torch_sdpa", **rule} for rule in rules]
    check_overrides(scope_from(attention_config={"rules": rules}, **settings), SITES)


@pytest.mark.parametrize(
    ("rules", "hidden", "hiding"),
    [
        ([{}, {"role": "self"}], 1, "rules[0]"),
        ([{"component": "transformer"}, {"role": "cross", "steps": "0-3"}], 1, "rules[0]"),
        ([{"role": "self", "steps": "0-3"}, {"layers": 1}, {"layers": 1, "role": "self"}], 2, None),
        ([{"role": "self", "steps": "0-3"}, {"role": "self", "steps": "0-3"}], 1, "rules[0]"),
        (
            [{"role": "self"}, {"role": "cross"}, {"component": "transformer"}],
            2,
            "rules[0], rules[1]",
        ),
    ],
)
def test_a_rule_that_earlier_rules_leave_nothing_of_is_an_error(rules, hidden, hiding):
    with pytest.raises(
        ComponentAttentionBackendNotAppliedError, match=rf"so put rules\[{hidden}\] before"
    ) as caught:
        check(*rules)
    assert f"has none left after {hiding or 'rules[1]'};" in str(caught.value)


@pytest.mark.parametrize(
    "rules",
    [
        [{"role": "self"}, {"component": "transformer"}],
        [{"steps": "0-3"}, {}],
        [{"role": "self", "steps": "0-3"}, {"role": "self", "steps": "2-5"}, {"role": "self"}],
        [{"layers": "0-1"}, {"layers": "1-2"}],
    ],
)
def test_a_rule_with_a_layer_or_a_step_of_its_own_is_none(rules):
    assert check(*rules) is None


def test_a_component_override_may_hide_a_rule():
    assert check({"role": "cross"}, component_attention_backends="transformer=auto") is None
