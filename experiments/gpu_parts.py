"""What the GPU benches ask before they begin: is there a GPU, and are the parts asked for parts they have?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch


def missing_gpu(bench: str) -> bool:
    """Whether torch sees no GPU; says so in one line. On a CPU the kernels' tests run in Triton's interpreter."""
    if torch.cuda.is_available():
        return False
    print(f"{bench} needs a GPU that torch sees; on a CPU the kernels' tests run in Triton's interpreter: make test", file=sys.stderr)
    return True


def check_parts(parser: argparse.ArgumentParser, asked: Sequence[str], known: Sequence[str]) -> None:
    """Ends with exit code 2 where a part is unknown: a misspelt part must not look like one that was run."""
    for part in asked:
        if part not in known:
            parser.error(f"no part {part!r}; there are {', '.join(known)}")
