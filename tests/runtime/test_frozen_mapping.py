import copy
import json
import pickle

import pytest

from multimodal_gen.runtime.frozen_mapping import FrozenMapping, frozen

DATA = {"b": {"c": [1, {"d": 2}]}, "a": 1}


def test_a_frozen_mapping_equals_what_it_was_made_of_but_for_lists() -> None:
    assert frozen(DATA) == {"a": 1, "b": {"c": (1, {"d": 2})}}
    assert list(FrozenMapping(DATA)) == ["b", "a"]
    assert len(FrozenMapping(DATA)) == 2


def test_equal_mappings_have_one_hash_whatever_their_order() -> None:
    other = FrozenMapping(dict(reversed(DATA.items())))
    assert {FrozenMapping(DATA): "found"}[other] == "found"


def test_nothing_in_it_can_be_changed() -> None:
    made = FrozenMapping(DATA)
    for place in (made, made["b"]):
        with pytest.raises(TypeError, match="does not support item assignment"):
            place["b"] = 1


def test_it_does_not_follow_its_source() -> None:
    source = {"a": {"b": [1]}}
    made = frozen(source)
    source["a"]["b"].append(2)
    assert made == {"a": {"b": (1,)}}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_it_can_be_copied_and_pickled(duplicate) -> None:
    made = duplicate(FrozenMapping(DATA))
    assert isinstance(made, FrozenMapping)
    assert made == FrozenMapping(DATA)


def test_it_shows_what_it_holds() -> None:
    assert repr(FrozenMapping({"a": {"b": 1}})) == "{'a': {'b': 1}}"
    assert json.loads(repr(FrozenMapping({})) or "") == {}
