"""Reading mappings from paths, JSON and `k=v,k=v`."""

import builtins
import json
import math
import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError
from multimodal_gen.settings import read_mapping

FORMS = "must be a path to a JSON or YAML file, a JSON object, or k=v,k=v; "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("{}", {}),
        (
            '{"sparsity": 0.5, "deep": {"list": [1, null]}}',
            {"sparsity": 0.5, "deep": {"list": [1, None]}},
        ),
        ("a=1", {"a": 1}),
        (" a = 1 , b = 2 ", {"a": 1, "b": 2}),
        (
            "a=-1,b=1e-3,c=.5,d=5.,e=+2,f=-1.5E+2",
            {"a": -1, "b": 1e-3, "c": 0.5, "d": 5.0, "e": 2, "f": -150.0},
        ),
        ("a=true,b=FALSE,c=Null", {"a": True, "b": False, "c": None}),
        (
            "a=[1,2],b=[[3, 4],[]],c=[x, 'y,z', true]",
            {"a": [1, 2], "b": [[3, 4], []], "c": ["x", "y,z", True]},
        ),
        ('a=\'1\',b="x,y=z",c="say \\"hi\\""', {"a": "1", "b": "x,y=z", "c": 'say "hi"'}),
        (r'a="C:\new\x"', {"a": r"C:\new\x"}),
        ("path=/a/b [1].json?x=1", {"path": "/a/b [1].json?x=1"}),
        ("a=1.0.0,b=0-3,c=10-", {"a": "1.0.0", "b": "0-3", "c": "10-"}),
        ("enable_x=true,sparsity=0.5", {"enable_x": True, "sparsity": 0.5}),
    ],
)
def test_text_reads_as_the_mapping_it_spells(text, expected):
    result = read_mapping(text)
    assert result == expected
    assert {k: type(v) for k, v in result.items()} == {k: type(v) for k, v in expected.items()}


def test_a_mapping_is_copied():
    given_mapping = {"a": [1]}
    result = read_mapping(given_mapping)
    assert result == given_mapping
    assert result is not given_mapping


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparsity", FORMS + "'sparsity' is not a pair k=v"),
        ("a=1,", FORMS + "'' is not a pair k=v"),
        ("dense_steps=0-3,38", "'38' is not a pair k=v .put values that hold commas in quotes"),
        ("=5", FORMS + "there is no name before '=5'"),
        ("a=", FORMS + "there is no value at the end of 'a='"),
        ("a=1,a=2", "'a' must be given once, got it twice"),
        ('{"a": 1, "a": 2}', "'a' must be given once, got it twice"),
        ("a=[1,2", FORMS + r"the list '\[1,2' has no end"),
        ("a='x", FORMS + ".*has no closing '"),
        ("a='x'y,b=1", "cannot read 'y' after `a`'s value"),
        ("a={b}", "the mapping '{b}' has 'b' without a value; write {key: value, key: value}"),
        ("a={0: 1", "the mapping '{0: 1' has no end"),
        ("a={0: 1, 0: 2}", "0 must be given once, got it twice"),
        ('{"a": ', FORMS + "cannot read JSON near .*line 1, column"),
        ("{a: 1}", "cannot read JSON near '{a: 1}'"),
        ("[1]", r"must be a mapping of names to values, got the list \[1\]"),
        ("5", "must be a mapping of names to values, got the number 5"),
        ("null", "must be a mapping of names to values, got null"),
        ("true", "must be a mapping of names to values, got the truth value true"),
        ('"x"', "must be a mapping of names to values, got the text 'x'"),
        ("a=NaN", "numbers must be finite, got NaN"),
        ("a=-inf", "numbers must be finite, got -inf"),
        ("a=[1,1e999]", "numbers must be finite, got 1e999"),
        ('{"a": NaN}', "numbers must be finite, got NaN"),
        ('{"a": 1e999}', "numbers must be finite, got 1e999"),
        ("a=" + "9" * 5000, "has too many digits"),
        ('{"": 1}', "must have names as keys, got ''"),
        ("foo.json", "must name a file that exists; file not found: 'foo.json'"),
        ("some/where", "must name a file that exists; file not found: 'some/where'"),
        ("[" * 100_000, "must nest at most 32 levels deep"),
        ("a=" + "[" * 100, "lists must nest at most 32 levels deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "must nest at most 32 levels deep"),
    ],
    ids=lambda value: value[:30],
)
def test_malformed_text_is_quoted_in_the_error(text, message):
    with pytest.raises(ConfigError, match=message):
        read_mapping(text)


def test_something_else_than_text_is_refused():
    with pytest.raises(ConfigError, match=r"attention_backend_config must be a path .* got 5"):
        read_mapping(5, name="attention_backend_config")


@pytest.mark.parametrize("suffix", [".json", ".JSON", ".yaml", ".yml"])
def test_a_file_is_read_by_its_extension(tmp_path, suffix):
    path = tmp_path / f"config{suffix}"
    path.write_text('{"sparsity": 0.5}', encoding="utf-8")
    assert read_mapping(str(path)) == {"sparsity": 0.5}
    assert read_mapping(path) == {"sparsity": 0.5}


def test_a_byte_order_mark_does_not_matter(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_mapping(path) == {"a": 1}


def test_a_file_name_may_hold_an_equals_sign(tmp_path):
    path = tmp_path / "sparsity=0.5.yaml"
    path.write_text("a: 1", encoding="utf-8")
    assert read_mapping(str(path)) == {"a": 1}


def test_yaml_scalars_read_as_in_the_other_forms(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "a: 1e-3\nb: .5\nc: 010\nd: on\ne: 2020-01-01\nf: 1:30\ng: '1'\nh: ~\ni:\nj: TRUE\n"
        "k: [1, x]\nl: {m: -1}\nn: |\n  5\n",
        encoding="utf-8",
    )
    assert read_mapping(path) == {
        "a": 1e-3,
        "b": 0.5,
        "c": 10,
        "d": "on",
        "e": "2020-01-01",
        "f": "1:30",
        "g": "1",
        "h": None,
        "i": None,
        "j": True,
        "k": [1, "x"],
        "l": {"m": -1},
        "n": "5\n",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.yaml", b"", "must be a readable JSON or YAML file; the file is empty"),
        ("c.json", b" \n", "the file is empty"),
        ("c.yaml", b"# nothing\n", "must be a mapping of names to values, got null"),
        ("c.yaml", b"- 1\n", r"must be a mapping of names to values, got the list \[1\]"),
        ("c.json", b"5", "must be a mapping of names to values, got the number 5"),
        ("c.json", b"{", "cannot read JSON near"),
        ("c.yaml", b"a: 1\na: 2\n", "'a' must be given once, got it twice"),
        ("c.yaml", b"a: [1\n", "cannot read YAML near .*line 2, column 1"),
        ("c.yaml", b"a: 1\n---\nb: 2\n", "cannot read YAML near"),
        ("c.yaml", b"a: \x00", "cannot read YAML: .*special characters are not allowed"),
        ("c.yaml", b"1: 2\n", "must have names as keys, got 1"),
        ("c.yaml", b"[1]: 2\n", r"keys must be names, got \[1\]"),
        ("c.yaml", b"a: &x [1]\nb: *x\n", r"anchors are not accepted, got \*x"),
        ("c.yaml", b"a: &x [*x]\n", r"anchors are not accepted, got \*x"),
        ("c.yaml", b"a: .inf\n", "numbers must be finite, got .inf"),
        (
            "c.yaml",
            b"a: !!python/object/apply:os.system ['x']\n",
            "tags are not accepted, got tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("c.yaml", b"a: !!set {x}\n", "tags are not accepted, got tag:yaml.org,2002:set"),
        ("c.yaml", b"a: !!map [1]\n", "tags are not accepted, got tag:yaml.org,2002:map"),
        ("c.yaml", b"a: 1\n---\nb: 1\n", "cannot read YAML near '---': but found another document"),
        ("c.yaml", b"a: " + b"[" * 5000, "must nest at most 32 levels deep"),
        ("c.yaml", b"a: \xff\xfe", "the file is not UTF-8 text"),
        ("c.txt", b"a=1", "the file must end in .json, .yaml, .yml, got 'c.txt'"),
    ],
)
def test_a_bad_file_is_named_in_the_error(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_mapping(path)
    assert name in str(caught.value)


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"this is a folder"):
        read_mapping(tmp_path)


def test_a_missing_path_object_is_named_in_the_error(tmp_path):
    with pytest.raises(ConfigError, match=r"file not found: .*absent'"):
        read_mapping(tmp_path / "absent")


def test_a_file_that_may_not_be_read_is_named_in_the_error(tmp_path, monkeypatch):
    path = tmp_path / "secret.yaml"
    path.write_text("a: 1", encoding="utf-8")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("multimodal_gen.files.os.open", refuse)
    with pytest.raises(ConfigError, match=r"secret.yaml.*the file cannot be read: Permission den"):
        read_mapping(path)


def test_a_folder_that_may_not_be_entered_is_named_in_the_error(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    with pytest.raises(ConfigError, match=r"'x/y.yaml' cannot be read: Permission denied"):
        read_mapping("x/y.yaml")


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
)
VALUES = st.recursive(SCALARS, lambda children: st.lists(children, max_size=4), max_leaves=8)
MAPPINGS = st.dictionaries(NAMES, VALUES, max_size=4)


def as_pairs(mapping):
    return ",".join(f"{key}={as_value(value)}" for key, value in mapping.items())


def as_value(value):
    if isinstance(value, list):
        return "[" + ",".join(as_value(item) for item in value) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return (
        {None: "null", True: "true", False: "false"}.get(value)
        if (value is None or isinstance(value, bool))
        else repr(value)
    )


def same(one, other):
    """Equal, and of equal types: 1, 1.0 and True are three values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and math.isclose(one, other, rel_tol=0)
    return type(one) is type(other) and one == other


@settings(max_examples=100, deadline=None)
@given(MAPPINGS)
def test_a_mapping_survives_json(mapping):
    assert same(read_mapping(json.dumps(mapping)), mapping)


@settings(max_examples=100, deadline=None)
@given(MAPPINGS)
def test_a_mapping_survives_pairs(mapping):
    assert same(read_mapping(as_pairs(mapping)), mapping)


class QuotingDumper(yaml.SafeDumper):
    """Quotes text: bare `1e5` is text to YAML 1.1 and a number to us."""


QuotingDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


@settings(max_examples=60, deadline=None)
@given(MAPPINGS)
def test_a_mapping_survives_yaml(tmp_path_factory, mapping):
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(yaml.dump(mapping, Dumper=QuotingDumper), encoding="utf-8")
    assert same(read_mapping(path), mapping)


def outcome(source):
    """Return the mapping, or the only error there may be."""
    try:
        return read_mapping(source)
    except ConfigError as error:
        return error


TEXTS = (
    st.text(max_size=40)
    | st.text("{}[]\"'=,:-.0123456789eEaN\\ \n", max_size=40)
    | MAPPINGS.map(as_pairs).map(lambda text: text[:-1])
    | MAPPINGS.map(json.dumps).map(lambda text: text[1:])
)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_arbitrary_text_is_read_or_refused_and_never_executed(text):
    with pytest.MonkeyPatch.context() as patch:
        for owner, attribute in ((builtins, "eval"), (builtins, "exec"), (os, "system")):
            patch.setattr(owner, attribute, lambda *a, **k: pytest.fail("executed"))
        result = outcome(text)
    assert isinstance(result, ConfigError) or all(isinstance(key, str) for key in result)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.text("{}[]\"'&*!|>-:?#%@ \na1.", max_size=60))
def test_arbitrary_yaml_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    result = outcome(path)
    if isinstance(result, ConfigError):
        assert "config.yaml" in str(result)
    else:
        assert all(isinstance(key, str) for key in result)
