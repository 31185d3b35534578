import copy
import pickle
import threading
from types import MappingProxyType

import pytest

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError, ConfigError
from multimodal_gen.runtime.layers.attention.config import IndexSelector, SigmaSelector, StepSet
from multimodal_gen.runtime.layers.attention.layer import (
    LocalAttention,
    UlyssesAttention,
    USPAttention,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    Rule,
    SelectionScope,
    Source,
    component_names,
    current_component,
    current_scope,
    decide,
    forced_backend,
    use_scope,
)
from multimodal_gen.runtime.layers.attention.selector import (
    component_attn_backend_context_manager,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.fakes import fake_backend

FA, SDPA = AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA
SAGE, FLEX = AttentionBackendEnum.SAGE_ATTN, AttentionBackendEnum.FLEX_ATTN


def site(component="transformer", role=AttentionRole.SELF, layer=0) -> LayerSite:
    return LayerSite(name="block.attn", component=component, role=role, layer=layer)


def component(backend, detail) -> BackendPreference:
    return BackendPreference(source=Source.COMPONENT, backend=backend, detail=detail)


def last(schedule) -> tuple[Source, AttentionBackendEnum | None]:
    steps, asked = schedule[-1]
    assert steps is None
    return asked.source, asked.backend


SCOPE = SelectionScope(
    default=BackendPreference(source=Source.SETTINGS, backend=SDPA),
    components=MappingProxyType(
        {
            "transformer": component(FA, "transformer"),
            "transformer.cross": component(FLEX, "transformer.cross"),
        }
    ),
)


def test_precedence_runs_from_forced_down_to_auto():
    cross = site(role=AttentionRole.CROSS)
    assert last(decide(cross, SCOPE, forced=SAGE)) == (Source.FORCED, SAGE)
    assert last(decide(cross, SCOPE)) == (Source.COMPONENT, FLEX)
    assert last(decide(site(), SCOPE)) == (Source.COMPONENT, FA)
    other = site("text_encoder")
    assert last(decide(other, SCOPE, layer_default=FLEX)) == (Source.SETTINGS, SDPA)
    nothing = SelectionScope()
    assert last(decide(other, nothing, layer_default=FLEX)) == (Source.LAYER_DEFAULT, FLEX)
    assert last(decide(other, nothing)) == (Source.AUTO, None)


def test_an_override_at_construction_is_stronger_than_the_scope_and_weaker_than_force():
    mine = component(SAGE, "transformer")
    assert last(decide(site(), SCOPE, construction=mine)) == (Source.COMPONENT, SAGE)
    assert last(decide(site(), SCOPE, construction=mine, forced=SDPA)) == (Source.FORCED, SDPA)


def test_automatic_on_the_command_line_leaves_the_layers_own_default():
    scope = SelectionScope(default=BackendPreference(source=Source.SETTINGS))
    assert last(decide(site(), scope, layer_default=FLEX)) == (Source.LAYER_DEFAULT, FLEX)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("transformer_2", ("transformer_2", "transformer")),
        ("text_encoder_3", ("text_encoder_3", "text_encoder")),
        ("text_encoder", ("text_encoder",)),
        ("_2", ("_2",)),
        (None, ()),
    ],
)
def test_a_numbered_component_answers_to_its_stem(name, names):
    assert component_names(name) == names


def test_transformer_2_takes_the_override_of_transformer_unless_it_has_its_own():
    assert last(decide(site("transformer_2"), SCOPE)) == (Source.COMPONENT, FA)
    both = {**SCOPE.components, "transformer_2": component(SAGE, "transformer_2")}
    scope = SelectionScope(components=both)
    assert last(decide(site("transformer_2"), scope)) == (Source.COMPONENT, SAGE)
    assert last(decide(site("transformer"), scope)) == (Source.COMPONENT, FA)


def rules(*entries: Rule) -> SelectionScope:
    return SelectionScope(
        default=BackendPreference(source=Source.SETTINGS, backend=SDPA), rules=entries
    )


@pytest.mark.parametrize(
    ("rule", "matching", "others"),
    [
        (Rule(backend=FA), [site(), site(None, layer=None)], []),
        (
            Rule(backend=FA, component="transformer"),
            [site(), site("transformer_2")],
            [site("vae"), site(None)],
        ),
        (Rule(backend=FA, component="transformer_2"), [site("transformer_2")], [site()]),
        (
            Rule(backend=FA, role=AttentionRole.CROSS),
            [site(role=AttentionRole.CROSS)],
            [site(), site(role=AttentionRole.ENCODER)],
        ),
        (
            Rule(backend=FA, layers=IndexSelector.parse("0-1,5-")),
            [site(layer=1), site(layer=9)],
            [site(layer=2), site(layer=None)],
        ),
        (
            Rule(backend=FA, component="vae", role=AttentionRole.SELF),
            [site("vae")],
            [site(), site("vae", AttentionRole.CROSS)],
        ),
    ],
)
def test_a_rule_matches_by_component_role_and_layer(rule, matching, others):
    for place in matching:
        assert last(decide(place, rules(rule))) == (Source.SETTINGS, FA)
    for place in others:
        assert last(decide(place, rules(rule))) == (Source.SETTINGS, SDPA)


def test_a_rule_with_steps_speaks_of_no_encoder():
    rule = Rule(backend=None, steps=IndexSelector.parse("0-3"))
    assert rule.matches(site(role=AttentionRole.SELF))
    assert not rule.matches(site(role=AttentionRole.ENCODER))


def test_the_first_matching_rule_wins_and_says_its_number():
    scope = rules(
        Rule(backend=FLEX, component="vae"), Rule(backend=FA), Rule(backend=SAGE, layers=None)
    )
    schedule = decide(site(), scope)
    assert len(schedule) == 1
    assert last(schedule) == (Source.SETTINGS, FA)
    assert schedule[0][1].detail == "rule 2"


def test_rules_with_steps_build_a_schedule_that_the_default_ends():
    early, late = IndexSelector.parse("0-3"), IndexSelector.parse("40-")
    schedule = decide(site(), rules(Rule(backend=FA, steps=early), Rule(backend=None, steps=late)))
    assert [(steps, asked.source, asked.backend) for steps, asked in schedule] == [
        (StepSet(indices=early), Source.SETTINGS, FA),
        (StepSet(indices=late), Source.AUTO, None),
        (None, Source.SETTINGS, SDPA),
    ]


def test_a_rule_may_name_steps_by_their_noise_levels():
    noisy = SigmaSelector.parse(">0.9")
    rule = Rule(backend=FA, steps=IndexSelector.parse("0-9"), sigma=noisy)
    schedule = decide(site(), rules(rule))
    assert [steps for steps, _ in schedule] == [
        StepSet(indices=IndexSelector.parse("0-9"), sigma=noisy),
        None,
    ]
    assert not rule.matches(site(role=AttentionRole.ENCODER))


def test_a_rule_for_every_step_ends_the_schedule():
    early = IndexSelector.parse("0-3")
    schedule = decide(site(), rules(Rule(backend=FA, steps=early), Rule(backend=FLEX)))
    assert [asked.backend for _, asked in schedule] == [FA, FLEX]


def test_a_component_override_is_stronger_than_rules():
    scope = SelectionScope(
        components={"transformer": component(SAGE, "transformer")}, rules=(Rule(backend=FA),)
    )
    assert last(decide(site(), scope)) == (Source.COMPONENT, SAGE)


def test_a_scope_survives_copying_and_pickling():
    scope = SelectionScope(
        default=SCOPE.default,
        components=SCOPE.components,
        rules=(Rule(backend=FA, steps=IndexSelector.parse("3-")),),
        strict=True,
    )
    for copied in (copy.deepcopy(scope), pickle.loads(pickle.dumps(scope))):
        assert dict(copied.components) == dict(scope.components)
        assert (copied.default, copied.rules, copied.strict) == (
            scope.default,
            scope.rules,
            scope.strict,
        )


def test_the_scope_in_use_ends_with_its_block():
    assert current_scope() == SelectionScope()
    with use_scope(SCOPE):
        assert current_scope() is SCOPE
    assert current_scope() == SelectionScope()


@pytest.mark.parametrize("wrong", [3, AttentionBackendEnum, ["fa"]])
def test_forcing_what_is_no_backend_is_refused_at_once(wrong):
    with pytest.raises(ConfigError, match=r"must be an AttentionBackendEnum member or its name"):
        global_force_attn_backend(wrong)
    assert forced_backend() is None


def test_forcing_ends_with_none():
    global_force_attn_backend(FA)
    assert forced_backend() is FA
    global_force_attn_backend(None)
    assert forced_backend() is None


def test_nested_forces_restore_the_outer_one_and_none_ends_it_inside():
    global_force_attn_backend(SDPA)
    with global_force_attn_backend_context_manager(FA):
        assert forced_backend() is FA
        with global_force_attn_backend_context_manager(SAGE):
            assert forced_backend() is SAGE
        with global_force_attn_backend_context_manager(None):
            assert forced_backend() is None
        assert forced_backend() is FA
    assert forced_backend() is SDPA


def test_an_exception_ends_a_force():
    with pytest.raises(KeyError, match=r"inside"), global_force_attn_backend_context_manager(FA):
        raise KeyError("inside")
    assert forced_backend() is None


def in_threads(*functions) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_see_the_process_wide_force_and_never_each_others_block():
    global_force_attn_backend(SDPA)
    meet = threading.Barrier(2)
    seen = {}

    def with_block() -> None:
        with global_force_attn_backend_context_manager(FA):
            meet.wait(timeout=60)
            seen["inside"] = forced_backend()
            meet.wait(timeout=60)

    def without_block() -> None:
        meet.wait(timeout=60)
        seen["beside"] = forced_backend()
        meet.wait(timeout=60)

    in_threads(with_block, without_block)
    assert seen == {"inside": FA, "beside": SDPA}


def test_a_thread_does_not_inherit_the_scope_or_component_of_another():
    seen = []
    with use_scope(SCOPE), component_attn_backend_context_manager(None, "transformer"):
        in_threads(lambda: seen.append((current_scope(), current_component())))
    assert seen == [(SelectionScope(), None)]


def test_layers_constructed_in_a_component_take_its_override_and_name(use_backends):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa"), fake_backend("flex_attn"))
    with component_attn_backend_context_manager(FA, "transformer", {"cross": FLEX}) as built:
        own = LocalAttention(2, 8)
        cross = LocalAttention(2, 8, is_cross_attention=True)
    outside = LocalAttention(2, 8)
    assert [layer.backend for layer in (own, cross, outside)] == [FA, FLEX, SDPA]
    assert own.site.component == "transformer"
    assert cross.report().entries[0].selection.asked.detail == "transformer.cross"
    assert built.used_keys == {"", "cross"}


def test_a_role_override_alone_leaves_the_other_roles(use_backends):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa"))
    roles = {AttentionRole.CROSS: FA}
    with component_attn_backend_context_manager(None, "transformer", roles):
        own = LocalAttention(2, 8)
        cross = LocalAttention(2, 8, is_cross_attention=True)
    assert (own.backend, cross.backend) == (SDPA, FA)


def test_nested_components_keep_their_overrides_apart(use_backends):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa"), fake_backend("flex_attn"))
    with component_attn_backend_context_manager(FA, "outer"):
        with component_attn_backend_context_manager(FLEX, "inner"):
            inner = LocalAttention(2, 8)
        outer = LocalAttention(2, 8)
    assert (inner.backend, outer.backend) == (FLEX, FA)


def test_an_override_that_reaches_no_layer_is_an_error():
    message = r"component 'vae' must reach at least one attention layer, none was reached by vae"
    with (
        pytest.raises(ComponentAttentionBackendNotAppliedError, match=message),
        component_attn_backend_context_manager(SDPA, "vae"),
    ):
        pass
    with (
        pytest.raises(ComponentAttentionBackendNotAppliedError, match=message),
        component_attn_backend_context_manager(None, "vae", {"cross": SDPA}),
    ):
        LocalAttention(2, 8)


def test_each_role_override_must_reach_a_layer():
    message = r"none was reached by transformer\.cross, transformer\.encoder; check"
    roles = {"self": SDPA, "cross": SDPA, "encoder": SDPA}
    with (
        pytest.raises(ComponentAttentionBackendNotAppliedError, match=message),
        component_attn_backend_context_manager(None, "transformer", roles) as built,
    ):
        LocalAttention(2, 8)
    assert built.used_keys == {"self"}


def test_an_override_that_roles_leave_nothing_of_is_an_error():
    with (
        pytest.raises(ComponentAttentionBackendNotAppliedError, match=r"reached by transformer;"),
        component_attn_backend_context_manager(SDPA, "transformer", {"cross": SDPA}),
    ):
        LocalAttention(2, 8, is_cross_attention=True)


def test_a_component_without_override_may_hold_no_layer():
    with component_attn_backend_context_manager(None, "scheduler"):
        assert current_component().name == "scheduler"


def test_an_exception_in_a_component_is_not_hidden_by_the_unused_override():
    with (
        pytest.raises(KeyError, match=r"weights"),
        component_attn_backend_context_manager(SDPA, "vae"),
    ):
        raise KeyError("weights")
    assert current_component() is None


def test_an_unknown_role_lists_the_roles():
    with (
        pytest.raises(ConfigError, match=r"keys among self, cross, encoder, got 'crss'"),
        component_attn_backend_context_manager(None, "transformer", {"crss": SDPA}),
    ):
        pass


@pytest.mark.parametrize("cls", [USPAttention, UlyssesAttention])
def test_rules_by_layer_go_by_the_first_number_of_a_layers_path(use_backends, cls):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa"))
    rule = Rule(backend=FA, layers=IndexSelector.parse("2-3"))
    paths = ("blocks.2.attn1", "blocks.4.attns.2", "3", "blocks.attn2", "")
    with use_scope(SelectionScope(rules=(rule,))):
        layers = [cls(2, 8, prefix=path) for path in paths]
    assert [layer.site.layer for layer in layers] == [2, 4, 3, None, None]
    assert [layer.backend for layer in layers] == [FA, SDPA, FA, SDPA, SDPA]
