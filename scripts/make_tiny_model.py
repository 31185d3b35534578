"""Make a tiny diffusers pipeline folder: real classes, random weights, no download.

    python scripts/make_tiny_model.py wan out/tiny-wan

Prints the folder, its size and a command that generates with it.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal_gen.errors import MultimodalGenError
from multimodal_gen.testing.tiny_models import (
    FAMILIES,
    STREAMING_FAMILIES,
    TinyFamily,
    check_request,
    make_tiny_model,
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2: the request cannot be met)."""
    parser = _Parser(description="Make a tiny diffusers pipeline folder with random weights.")
    known = ", ".join((*FAMILIES, *STREAMING_FAMILIES))
    parser.add_argument("family", metavar="FAMILY", help=f"one of {known}")
    parser.add_argument("out", metavar="OUT", help="new or empty folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    try:
        check_request(args.family, args.out, seed=args.seed)
        _quieten_libraries()
        folder = make_tiny_model(args.family, args.out, seed=args.seed)
    except (MultimodalGenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(folder)
    print(f"{_size(folder) / 1e6:.1f} MB")
    print(_command({**FAMILIES, **STREAMING_FAMILIES}[args.family], folder))
    return 0


def _quieten_libraries() -> None:
    """Turn off the progress bars and notices of the libraries; this process is ours alone."""
    try:
        import diffusers
        import transformers
    except ImportError:
        return  # making the model says what to install
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _command(family: TinyFamily, folder: Path) -> str:
    """Return a command line that generates with the new folder in a few seconds."""
    kwargs = family.generate_kwargs
    flags = ["prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps"]
    values = {flag: kwargs[flag] for flag in flags if flag in kwargs}
    if family.guidance_scale is not None and family.guidance_name is not None:
        values["guidance_scale"] = family.guidance_scale
    words = ["sglang", "generate", "--model-path", str(folder)]
    for flag, value in values.items():
        words += [f"--{flag.replace('_', '-')}", str(value)]
    if family.needs_image:
        words += ["--image-path", str(_picture(family, folder))]
    if family.name in STREAMING_FAMILIES:
        for name, value in family.extra_kwargs.items():
            words += ["--pipeline-arg", f"{name}={json.dumps(value)}"]
        words += ["--stream"]
    return shlex.join([*words, "--seed", "0"])


def _picture(family: TinyFamily, folder: Path) -> Path:
    """Return a picture of the family's size, made in the new folder."""
    from PIL import Image

    path = folder / "picture.png"
    picture = Image.linear_gradient("L").resize((family.width, family.height))
    picture.convert("RGB").save(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
