"""What the components of a pipeline's folder must have; without it they compute noise.

Libraries fill gaps by themselves: a tokenizer without files has no words, and a model whose
weights lack a parameter draws it at random.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import UsageError

__all__ = ["check_complete", "check_folders", "load_text_models"]

_SHOWN = 3
# Files that any tokenizer of transformers can be made of, whatever its class names.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json")


def check_folders(model_path: str, components: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a folder that lacks components, or components that lack their first files.

    Args:
        model_path: a folder, or a hub id, which is not looked at.
        components: (library, class name) by component.

    Raises:
        UsageError: a folder, a config or the files of a tokenizer are missing.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return
    missing = [name for name in components if not (folder / name).is_dir()]
    if missing:
        raise UsageError(
            f"the pipeline at {model_path!r} must have a folder for every component of its "
            f"model_index.json, missing {', '.join(missing)}; download it again"
        )
    for name, (library, class_name) in components.items():
        files = _needed(_class_of(library, class_name))
        if files and not any((folder / name / file).is_file() for file in files):
            raise UsageError(
                f"the pipeline at {model_path!r} must have {' or '.join(files)} in {name}, which "
                f"has none; download it again"
            )


def load_text_models(
    model_path: str, components: Mapping[str, tuple[str, str]], dtype: Any
) -> dict[str, Any]:
    """Load the components that are models of transformers.

    Args:
        model_path: folder or hub id.
        components: (library, class name) by component.
        dtype: one for all, or one by component and "default".

    Returns:
        Models by component, in evaluation mode, on the CPU.

    Raises:
        UsageError: the weights of a model lack parameters; transformers would draw them at random.
    """
    from transformers import PreTrainedModel

    loaded = {}
    for name, (library, class_name) in components.items():
        found = _class_of(library, class_name)
        if library != "transformers" or found is None or not issubclass(found, PreTrainedModel):
            continue
        own = dtype.get(name, dtype["default"]) if isinstance(dtype, Mapping) else dtype
        model, info = found.from_pretrained(
            model_path, subfolder=name, dtype=own, output_loading_info=True
        )
        if info["missing_keys"]:
            raise _incomplete(model_path, name, info["missing_keys"])
        loaded[name] = model
    return loaded


def check_complete(model_path: str, pipe: Any) -> None:
    """Refuse models with parameters that no file held: diffusers leaves them without values.

    Raises:
        UsageError: a parameter is on the meta device.
    """
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            state = component.state_dict(keep_vars=True)
            missing = [key for key, value in state.items() if getattr(value, "is_meta", False)]
            if missing:
                raise _incomplete(model_path, name, missing)


def _incomplete(model_path: str, name: str, missing: Collection[str]) -> UsageError:
    names = sorted(missing)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return UsageError(
        f"the weights of {name} at {model_path!r} must hold every parameter of its config, missing "
        f"{', '.join(names[:_SHOWN])}{more}; download the component again"
    )


def _class_of(library: str, class_name: str) -> Any:
    """Return the class of a component, or None for one that is not these libraries' own."""
    import diffusers
    import transformers

    module = {"diffusers": diffusers, "transformers": transformers}.get(library)
    found = getattr(module, class_name, None)
    return found if isinstance(found, type) else None


def _needed(found: Any) -> tuple[str, ...]:
    """Return the files of which a component of the class has at least one; none if not known."""
    from diffusers import ConfigMixin
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if found is None:
        return ()
    if issubclass(found, ConfigMixin):
        return (str(found.config_name),) if found.config_name else ()
    if issubclass(found, PreTrainedModel):
        return ("config.json",)
    if issubclass(found, PreTrainedTokenizerBase) and found.vocab_files_names:
        return tuple(dict.fromkeys((*found.vocab_files_names.values(), *_TOKENIZERS)))
    return ()
