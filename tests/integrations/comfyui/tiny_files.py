"""Makes the files of a tiny Wan 2.1 for ComfyUI: run by the Python that runs ComfyUI.

    python tiny_files.py CHECKOUT FOLDER

writes into FOLDER what `main.py --base-directory FOLDER` looks for: a transformer of two layers,
an autoencoder, and a node that gives encoded prompts, since text encoders have one size.
"""

import sys
from pathlib import Path

import torch

_PROMPT = """
import torch


class TinyPrompt:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def encode(self, seed):
        noise = torch.randn(1, 6, 4096, generator=torch.Generator().manual_seed(seed))
        return ([[noise, {}]],)


NODE_CLASS_MAPPINGS = {"TinyPrompt": TinyPrompt}
"""


def write(checkout: Path, folder: Path) -> None:
    sys.path.insert(0, str(checkout))
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.wan.model import WanModel
    from comfy.ldm.wan.vae import WanVAE
    from safetensors.torch import save_file

    torch.manual_seed(0)
    transformer = WanModel(
        model_type="t2v",
        dim=256,
        ffn_dim=128,
        num_heads=2,
        num_layers=2,
        operations=comfy.ops.disable_weight_init,
        device="cpu",
        dtype=torch.float32,
    )
    vae = WanVAE(
        dim=8,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    for model, name in (
        (transformer, "diffusion_models/tiny.safetensors"),
        (vae, "vae/tiny.safetensors"),
    ):
        path = folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            key: 0.05 * torch.randn_like(x, dtype=torch.float32)
            for key, x in model.state_dict().items()
        }
        save_file(state, path)
    node = folder / "custom_nodes" / "tiny_prompt" / "__init__.py"
    node.parent.mkdir(parents=True, exist_ok=True)
    node.write_text(_PROMPT)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
