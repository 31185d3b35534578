"""A package of custom nodes of ComfyUI; this folder is what its `custom_nodes` takes.

Its nodes come from the installed `multimodal_gen`, and are made when ComfyUI asks for them, because
`comfy_api` exists in its process alone.
"""

from typing import Any

# Of the JavaScript that the nodes have in the browser.
WEB_DIRECTORY = "./web"
_LOADED = ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "comfy_entrypoint")


def __getattr__(name: str) -> Any:
    """Return what ComfyUI looks for in a package of custom nodes."""
    if name not in _LOADED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multimodal_gen.integrations.comfyui import node

    return getattr(node, name)
