"""Chat templates in model folders, which are programs: refused when they fail or do not end."""

import shutil

import pytest

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator import Session
from multimodal_gen.runtime.generator.chat_templates import limited_templates
from multimodal_gen.runtime.server_args import ServerArgs

NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


class Nothing:
    """What is attached, of which nothing is asked."""

    def remove(self) -> None: ...


@pytest.fixture
def session(tiny_pipeline, tmp_path):
    """Load a pipeline whose tokenizer has the given chat template."""

    def make(template: str) -> tuple[Session, ServerArgs]:
        folder = tmp_path / "model"
        shutil.copytree(tiny_pipeline("flux2_klein"), folder)
        (folder / "tokenizer" / "chat_template.jinja").write_text(template)
        args = ServerArgs(
            model_path=str(folder), prompt="a fox", num_inference_steps=1, height=32, width=32
        )
        return Session(args), args

    return make


@pytest.mark.slow_cases("{{ raise_exception('never') }}")
@pytest.mark.parametrize("template", ["{% if", "{{ raise_exception('never') }}"])
def test_a_template_that_fails_is_explained_in_the_run(template: str, session) -> None:
    loaded, args = session(template)
    with pytest.raises(UsageError, match="the chat template of the model's tokenizer fails, check"):
        loaded.generate(args, lambda pipe: Nothing(), save=False)


def test_a_template_that_never_ends_is_given_up_in_the_run(session, monkeypatch) -> None:
    monkeypatch.setattr("multimodal_gen.runtime.generator.chat_templates._SECONDS", 0.2)
    loaded, args = session(NESTED)
    with pytest.raises(UsageError, match=r"chat template .* must be filled in within 0.2 s"):
        loaded.generate(args, lambda pipe: Nothing(), save=False)


def test_the_limit_is_for_the_block_alone(session) -> None:
    loaded, _ = session("{{ messages[0].content }}")
    tokenizer = loaded._pipe.tokenizer
    with limited_templates(loaded._pipe):
        assert "apply_chat_template" in vars(tokenizer)
        messages = [{"role": "user", "content": "a fox"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "a fox"
    assert "apply_chat_template" not in vars(tokenizer)
