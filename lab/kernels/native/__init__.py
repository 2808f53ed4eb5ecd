"""Products with packed weights on the CPU: GGUF blocks and the lab's own codecs, decoded in the first-level cache while they are multiplied.

Why: `lab.ops` decodes a whole matrix per call, which for one token moves many times the packed bytes. These kernels are C++ that is built at first
use; where it cannot be built, `unavailable` says why in one line and the caller goes on with `lab.ops` and records that it did.
What it does not prove: speed, which `experiments/native_bench.py` measures on the machine at hand; correctness beyond the codecs, which the tests compare with.
"""

from __future__ import annotations

from lab.kernels.native.calls import Prepared, decode, expert_products, prepare, product, supports, unavailable

__all__ = ["Prepared", "decode", "expert_products", "prepare", "product", "supports", "unavailable"]
