"""Dense attention at the shapes of video models: every kernel present.

python3 scripts/bench/run.py dense --commit HASH
"""

from dataclasses import dataclass

from _harness import Bench
from auto import measure_shape

BACKENDS = ("torch_sdpa", "torch_cudnn_sdpa", "fa", "triton_attn", "sage_attn", "flex_attn")


@dataclass(frozen=True)
class Case:
    """A model's self-attention, and its shape as `auto` tells them."""

    name: str
    shape: str


CASES = (
    Case("hunyuan 117f 768x1280", "1x115200x24x128"),
    Case("hunyuan 129f 720x1280", "1x118800x24x128"),
    Case("wan 14B 720p 81f", "1x75600x40x128"),
    Case("wan 14B 480p 81f", "1x32760x40x128"),
    Case("wan 1.3B 480p 81f", "1x32760x12x128"),
    Case("wan 69f 768x1280", "1x69120x40x128"),
    Case("stepvideo 204f", "1x82944x48x128"),
    Case("wan 14B 77f 768x1280", "1x76800x40x128"),
    Case("wan 1.3B 77f 448x832", "1x29120x12x128"),
    Case("wan 1.3B 61f 448x832", "1x23296x12x128"),
    Case("sla bench", "2x32760x16x128"),
    Case("svg2 bench", "1x74256x32x128"),
    Case("flashinfer bench", "1x109632x7x128"),
    Case("vsa bench", "1x49152x16x128"),
)
SMOKE = (Case("smoke", "1x256x2x32"),)


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a case."""
    measure_shape(bench, case.shape, BACKENDS, name=case.name)
