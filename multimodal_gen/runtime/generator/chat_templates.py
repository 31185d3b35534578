"""Chat templates of a model folder, filled in where they can do no harm before they are used.

Some pipelines put prompts into a template that comes with the tokenizer. It is a program: one that
never ends, or asks for all memory, would take this process with it. So each is tried in another
process, which may take a few seconds and little memory.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from multimodal_gen.errors import UsageError

_SECONDS = 5
_BYTES = 1 << 30
_WAIT = 60  # seconds, on a machine that is busy

# What ends by itself is told from what does not; other errors are the run's to explain.
_SCRIPT: Final = """
import json, sys
asked = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (asked["bytes"], asked["bytes"]))
except (ImportError, ValueError, OSError):
    pass
import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

class Generation(Extension):
    tags = {"generation"}
    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)

def refuse(message):
    raise jinja2.TemplateError(message)

environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
)
environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value)
environment.globals.update(raise_exception=refuse, strftime_now=lambda form: "")
for content in ("a fox", [{"type": "text", "text": "a fox"}]):
    for roles in (("system", "user"), ("user",)):
        messages = [{"role": role, "content": content} for role in roles]
        try:
            text = environment.from_string(asked["template"]).render(
                messages=messages, add_generation_prompt=True, bos_token="", eos_token=""
            )
            if len(text) > 1 << 20:
                sys.exit(3)
        except MemoryError:
            sys.exit(3)
        except Exception:
            pass
"""


def check_templates(model_path: str, pipe: Any) -> None:
    """Refuse a pipeline with a chat template that does not end, or takes all memory.

    Args:
        model_path: folder or hub id, for messages.
        pipe: the loaded pipeline.

    Raises:
        UsageError: names the component.
    """
    for name, component in pipe.components.items():
        for template in _templates(component):
            if not _ends(template):
                raise UsageError(
                    f"component {name} of {model_path!r} must have a chat template that is filled "
                    f"in within {_SECONDS} s and {_BYTES >> 30} GiB, got one that is not; check "
                    f"its chat_template, or download it again"
                )


def _templates(component: Any) -> Iterator[str]:
    found = getattr(component, "chat_template", None)
    for template in found.values() if isinstance(found, Mapping) else (found,):
        if isinstance(template, str):
            yield template


@lru_cache(maxsize=64)
def _ends(template: str) -> bool:
    """Tell whether a template can be filled in with a prompt."""
    asked = json.dumps({"template": template, "seconds": _SECONDS, "bytes": _BYTES})
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-c", _SCRIPT],
            input=asked.encode(),
            capture_output=True,
            timeout=_WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    # Below zero is a signal, that of the limits; 1 is an interpreter without jinja2.
    return tried.returncode in (0, 1)
