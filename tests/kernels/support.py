"""What the kernel tests share: the device they run on and how far a result may be from the float32 reference."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-3
"""|out - ref| / |ref| for float16 outputs: rounding 3e-4, level factor up to 2.2e-4, and on a GPU float16 sums within 32 weights up to 1e-3."""
