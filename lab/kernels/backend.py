"""What all kernels share: the typed decorator, which branch runs on this machine, and small device functions.

Why branches: NVIDIA gets inline PTX where Triton's own code costs several times the instructions (notes in experiments/kernel_log.md); every such place
has a branch in plain Triton, which is what ROCm and the interpreter (TRITON_INTERPRET=1) run and what the PTX is tested against.
What it does not prove: that the plain branch is fast, or right on an AMD GPU: it has been compiled for gfx1201, not run there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.errors import LabError

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""`triton.jit` with a type: a decorated function is callable from other kernels and, as `kernel[grid](...)`, from the host."""


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU. Its bf16 arithmetic is wrong, so kernels compute in float32 or float16."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _hopper() -> bool:
    """Whether the GPU is NVIDIA's and knows griddepcontrol (sm_90, PTX ISA 7.8)."""
    return torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def use_ptx() -> bool:
    """Whether the branches with inline PTX run: Hopper or later, not the interpreter. Older NVIDIA GPUs take the plain branch."""
    return not interpreted() and _hopper()


EARLY = False
"""Whether a chain's kernels let the next one start before they wait, or after."""


def chain_ptx() -> int:
    """PTX of a chain's kernels: 0 where there is none, 1 to let the next kernel start after the wait, 2 before it."""
    return (2 if EARLY else 1) if use_ptx() else 0


def launch_options() -> dict[str, bool]:
    """Launch keywords for kernels that begin with `wait_for_inputs`: on NVIDIA their launch overlaps the end of the kernel before them."""
    return {"launch_pdl": True} if use_ptx() else {}


def require(condition: bool, kernel: str, message: str) -> None:
    """Raises LabError `kernel <name>: <message>` where `condition` does not hold."""
    if not condition:
        raise LabError(f"kernel {kernel}: {message}")


def require_gpu(kernel: str, *tensors: Tensor) -> None:
    """Raises LabError where a tensor is not on a GPU; in the interpreter any device will do."""
    for tensor in tensors:
        require(tensor.is_cuda or interpreted(), kernel, f"a tensor is on {tensor.device}; move it to the GPU, or set TRITON_INTERPRET=1 for a slow check")


@jit
def wait_for_inputs(PTX: tl.constexpr) -> None:
    """First statement of a kernel launched with `launch_options`: waits until the kernel before it has finished and its writes are visible, then lets the
    next one be scheduled. Nothing may be read or written above it. Does nothing elsewhere, where kernels start in order (CUDA: programmatic dependent
    launch, griddepcontrol in the PTX ISA, sm_90 and later)."""
    if PTX:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def let_next_start(PTX: tl.constexpr) -> None:
    """Where PTX is 2, lets the next kernel of a chain be scheduled, so that it asks for its weights while this one still waits. Safe anywhere, because what
    the next one reads of others it reads below its own `inputs_ready`, which returns when every kernel before it has ended."""
    if PTX == 2:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def inputs_ready(PTX: tl.constexpr) -> None:
    """Waits until the kernels before this one have ended and their writes are visible; where PTX is 1, lets the next one be scheduled only then. Above it
    only what no kernel of the chain writes may be read, and nothing written. Does nothing where PTX is 0."""
    if PTX:
        tl.extra.cuda.gdc_wait()
        if PTX == 1:
            tl.extra.cuda.gdc_launch_dependents()


@jit
def e4m3_to_half(byte: tl.tensor) -> tl.tensor:
    """e4m3fn bits (uint8) -> float16 holding value / 256; exact for every finite value, with denormals to denormals.

    The seven low bits fit float16's exponent and mantissa shifted by 7, and float16's bias is larger by 8 (as in lab.codecs.e4m3). Integer decode,
    because Triton converts e4m3 in software or not at all on some targets.
    """
    wide = byte.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@jit
def silu_mul(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up
