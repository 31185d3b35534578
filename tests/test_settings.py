"""Plain values: one reader of words, numbers and JSON, wherever they were typed."""

import copy
import json
import pickle
import subprocess
import sys

import pytest

from multimodal_gen.files import MalformedError
from multimodal_gen.settings import (
    FrozenMapping,
    as_mapping,
    frozen,
    read_json,
    read_pairs,
    read_scalar,
    read_value,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-5", -5),
        (".5", 0.5),
        ("1e-3", 1e-3),
        ("TRUE", True),
        ("null", None),
        ("on", "on"),
    ],
)
def test_a_word_or_a_number_is_the_same_in_every_form(text, value):
    assert read_scalar(text) == value
    assert read_value(f" {text} ") == (f" {text} " if value == text else value)
    assert read_pairs(f"a={text}") == {"a": value}
    if text in ("1", "-5", "1e-3", "null"):  # JSON spells the others in its own way
        assert read_json(text) == value


@pytest.mark.parametrize("text", ["[1, 2]", '{"a": 1}', '"5"'])
def test_what_opens_like_json_is_json(text):
    assert read_value(text) == read_json(text)


@pytest.mark.parametrize("read", [read_json, read_value])
def test_repeated_keys_are_refused_in_json(read):
    with pytest.raises(MalformedError, match="'a' must be given once, got it twice"):
        read('{"a": 1, "a": 1}')


def test_repeated_keys_are_refused_in_pairs():
    with pytest.raises(MalformedError, match="'a' must be given once, got it twice"):
        read_pairs("a=1,a=1")
    with pytest.raises(MalformedError, match=r"keys must be names, got \[1\]"):
        as_mapping([([1], 2)])


@pytest.mark.parametrize("text", ["nan", "-inf", "1e999", "9" * 5000])
def test_a_number_that_cannot_be_kept_is_refused(text):
    for read in (read_scalar, read_value):
        with pytest.raises(MalformedError, match=r"numbers must be finite|too many digits"):
            read(text)


def test_what_nests_without_end_is_refused():
    with pytest.raises(MalformedError, match="values must nest at most 32 levels deep"):
        read_value("[" * 100_000)


def test_reading_needs_the_standard_library_only():
    code = (
        "import sys, multimodal_gen.settings; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'yaml', 'diffusers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
