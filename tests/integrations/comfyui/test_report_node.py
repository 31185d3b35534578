"""The script of the report's node, in a real browser with what it needs of ComfyUI's frontend."""

from pathlib import Path
from typing import Any

import pytest

from multimodal_gen.integrations import comfyui

SCRIPT = Path(comfyui.__file__).parent / comfyui.WEB_DIRECTORY / "report.js"
FRONTEND = {
    "/": "<script type=module src=/extensions/attention_backend/report.js></script>",
    "/extensions/attention_backend/report.js": SCRIPT.read_text("utf-8"),
    "/scripts/app.js": """export const app = {
        registerExtension(extension) { window.extension = extension; },
    };""",
    "/scripts/widgets.js": """export const ComfyWidgets = {
        STRING(node, name, [kind, options]) {
            const element = document.createElement("textarea");
            node.widgets.push({ name, element, options: { ...options } });
            return { widget: node.widgets.at(-1) };
        },
    };""",
}
MAKE = """(comfyClass) => {
    window.node = { comfyClass, widgets: [], setSize() {} };
    window.extension.nodeCreated(window.node);
    return window.node.widgets.map(({ value, serialize, options, element }) =>
        ({ value, serialize, sent: options.serialize, fixed: element.readOnly }));
}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Any:
    """A page of a frontend that has loaded the script."""
    opened = browser.new_page()

    def serve(route: Any) -> None:
        path = route.request.url.removeprefix("http://comfy.test")
        kind = "text/javascript" if path.endswith(".js") else "text/html"
        route.fulfill(body=FRONTEND.get(path, ""), content_type=kind)

    opened.route("**/*", serve)
    opened.goto("http://comfy.test/")
    opened.wait_for_function("() => window.extension", timeout=20_000)
    return opened


def test_the_node_says_what_a_run_will_show_and_then_shows_it(page: Any) -> None:
    (widget,) = page.evaluate(MAKE, "MultimodalGenAttentionReport")
    assert widget.pop("value").startswith("After a run")
    assert widget == {"serialize": False, "sent": False, "fixed": True}
    shown = """() => {
        window.node.onExecuted({ text: ["sla_attn in 30 layers"] });
        return window.node.widgets[0].value;
    }"""
    assert page.evaluate(shown) == "sla_attn in 30 layers"


def test_other_nodes_are_left_alone(page: Any) -> None:
    assert page.evaluate(MAKE, "MultimodalGenAttentionBackend") == []
