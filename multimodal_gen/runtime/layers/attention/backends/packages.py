"""The optional packages that backends declare, which are looked for without importing any of them.

This table alone is read to look for them: the files of the backends are not.
"""

from multimodal_gen.kernels.engine import CUDNN_FRONTEND, FLASH_ATTN_4, FLASH_KMEANS, TRITON
from multimodal_gen.kernels.requirements import PackageProbe

_AITER = "install github.com/ROCm/aiter"
_FLASH_ATTN = "pip install flash-attn --no-build-isolation"
_MATE = "install github.com/MooreThreads/mate"
_SAGE = "github.com/thu-ml/SageAttention"
_SPARGE = "pip install git+https://github.com/thu-ml/SpargeAttn.git --no-build-isolation"

AITER = PackageProbe("aiter", "amd-aiter", _AITER)
AITER_SAGE = PackageProbe("aiter.ops.triton.attention.fav3_sage", "amd-aiter", _AITER)
FASTVIDEO_KERNEL = PackageProbe(
    "fastvideo_kernel", "fastvideo-kernel", "pip install fastvideo-kernel einops"
)
FLASH_ATTN_2 = PackageProbe(
    "flash_attn.flash_attn_interface", "flash-attn", _FLASH_ATTN, minimum="2.6", below="3"
)
FLASH_ATTN_ANY = PackageProbe("flash_attn.flash_attn_interface", "flash-attn", _FLASH_ATTN)
FLASH_ATTN_3 = PackageProbe(
    "flash_attn_interface",
    "flash_attn_3",
    "build hopper/ of github.com/Dao-AILab/flash-attention",
)
FLASH_ATTN_3_FORWARD = PackageProbe("fa3_fwd_interface", "fa3-fwd", "pip install fa3-fwd")
FLASH_ATTN_MUSA = PackageProbe("flash_attn_interface", "mate-flash-attention", _MATE)
FLASH_ATTN_XPU = PackageProbe(
    "sgl_kernel.flash_attn", "sglang-kernel-xpu", "install github.com/sgl-project/sgl-kernel-xpu"
)
FLASHINFER = PackageProbe(
    "flashinfer", "flashinfer-python", "pip install flashinfer-python", minimum="0.2"
)
SAGEATTENTION_1 = PackageProbe(
    "sageattention", "sageattention", "pip install sageattention", minimum="1.0.6", below="2"
)
SAGEATTENTION_2 = PackageProbe("sageattention", "sageattention", f"build {_SAGE}", minimum="2")
SAGEATTENTION_MUSA = PackageProbe("sageattention", "sageattention", _MATE)
SAGEATTN_3 = PackageProbe("sageattn3", "sageattn3", f"build sageattention3_blackwell/ of {_SAGE}")
SLA = PackageProbe(
    "sparse_linear_attention",
    "sparse_linear_attention",
    "pip install git+https://github.com/thu-ml/SLA.git",
)
SPAS_SAGE_ATTN = PackageProbe("spas_sage_attn", "spas_sage_attn", _SPARGE)
ST_ATTN = PackageProbe("st_attn", "st-attn", "pip install st-attn")
SVG = PackageProbe("svg", "svg", "see https://github.com/svg-project/Sparse-VideoGen")
TORCH_NPU = PackageProbe("torch_npu", "torch-npu", "pip install torch-npu")
VSA = PackageProbe("vsa", "vsa", "pip install vsa")  # importing it needs a GPU
XFORMERS = PackageProbe("xformers.ops", "xformers", "pip install xformers", minimum="0.0.28")

ALL_PACKAGES = frozenset({CUDNN_FRONTEND, FLASH_ATTN_4, FLASH_KMEANS, TRITON}).union(
    value for value in globals().values() if isinstance(value, PackageProbe)
)
