"""Hostile chat templates in model folders: tried in a process with limits, and refused."""

import shutil

import pytest

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator import Session, chat_templates
from multimodal_gen.runtime.server_args import ServerArgs

MULTIPLIED = "{{ 'x' * 10 ** 10 }}"
DOUBLING = (
    "{% set ns = namespace(a='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}"
)
NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
USUAL = (
    "{%- for message in messages %}{{ '<|' ~ message.role ~ '|>' }}{{ message.content | tojson }}"
    "{% if not loop.last %}{% continue %}{% endif %}{% generation %}{% endgeneration %}{% endfor %}"
)


@pytest.fixture
def asked(tiny_pipeline, tmp_path):
    """Arguments for a pipeline whose tokenizer has the given chat template."""

    def make(template: str) -> ServerArgs:
        folder = tmp_path / "model"
        shutil.copytree(tiny_pipeline("flux2_klein"), folder)
        (folder / "tokenizer" / "chat_template.jinja").write_text(template)
        return ServerArgs(
            model_path=str(folder), prompt="a fox", num_inference_steps=1, height=32, width=32
        )

    return make


def test_a_template_that_takes_all_memory_is_refused_by_its_component(asked) -> None:
    message = "component tokenizer of .* must have a chat template that is filled in within 5 s"
    with pytest.raises(UsageError, match=message):
        Session(asked(MULTIPLIED), lambda args, pipe: None)


@pytest.mark.slow_cases("{{ raise_exception('never') }}")
@pytest.mark.parametrize("template", ["{% if", "{{ raise_exception('never') }}"])
def test_a_template_that_fails_is_explained_in_the_run(template: str, asked) -> None:
    class Nothing:
        def remove(self) -> None: ...

    args = asked(template)
    session = Session(args, lambda args, pipe: Nothing())
    with pytest.raises(UsageError, match="the chat template of the model's tokenizer fails, check"):
        session.generate(args, save=False)


def test_a_usual_template_passes_and_is_tried_once() -> None:
    chat_templates._ends.cache_clear()
    assert chat_templates._ends(USUAL)
    assert chat_templates._ends(USUAL)
    assert chat_templates._ends.cache_info().hits == 1


@pytest.mark.slow
@pytest.mark.parametrize("template", [DOUBLING, NESTED])
def test_a_template_that_never_ends_is_refused(template: str) -> None:
    assert not chat_templates._ends(template)
