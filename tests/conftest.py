"""Kernels run in Triton's interpreter where there is no GPU. It must be chosen before anything imports triton, so here and not beside the kernels' tests."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
