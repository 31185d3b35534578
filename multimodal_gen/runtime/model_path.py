"""Where a model is: a folder of a pipeline, or an id on the Hub.

Importing this module imports neither torch nor diffusers.
"""

import re

from multimodal_gen.errors import UsageError
from multimodal_gen.settings import expanded

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What an id of the Hugging Face Hub looks like."""

INDEX = "model_index.json"


def locate(model_path: str) -> str:
    """Return the folder, with `~` expanded, or the hub id.

    Raises:
        UsageError: it is neither, or a folder without an index.
    """
    folder = expanded(model_path, "--model-path")
    if (folder / INDEX).is_file():
        return str(folder)
    if folder.is_dir():
        single = (folder / "config.json").is_file()
        hint = "; this looks like one component, name the folder above it" if single else ""
        raise UsageError(
            f"--model-path must be a pipeline folder with {INDEX}, got {model_path!r} "
            f"without one{hint}"
        )
    if folder.exists():
        raise UsageError(
            f"--model-path must be a pipeline folder with {INDEX}, got the file {model_path!r}; "
            f"make a folder of it with from_single_file and save_pretrained of diffusers"
        )
    if not HUB_ID.fullmatch(model_path):
        raise UsageError(
            f"--model-path must be an existing pipeline folder or a hub id such as "
            f"Wan-AI/Wan2.1-T2V-1.3B-Diffusers, got {model_path!r}, which is neither"
        )
    return model_path
