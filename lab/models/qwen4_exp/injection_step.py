"""The n-gram module in a decode step: two launches around its table and its projections, for either kind of step.

Why apart: the plain code of lab.models.qwen4_exp.ngram is about 80 small launches for one token. What it does not prove: that a table in host memory keeps up.
"""

from __future__ import annotations

from torch import Tensor

from lab.kernels import ngram_step
from lab.kernels.mixer_step import Streams
from lab.models.qwen4_exp.model import ModelState
from lab.models.qwen4_exp.ngram import NGramInjection
from lab.models.qwen4_exp.step_parts import Stacked


class StepInjection:
    """Streams -> the same with the module's output added in place, ready for a mixer with `norm`; advances the module's state."""

    def __init__(self, ple: NGramInjection) -> None:
        self.ple = ple
        self.project = Stacked(ple.key, ple.value)
        self.taps = ple.taps.squeeze(1).T.contiguous()

    def __call__(self, streams: Streams, ids: Tensor, state: ModelState, norm: Tensor) -> Streams:
        """ids int64 [B, 1], norm float32 [C * H]."""
        ple, c = self.ple, self.ple.config
        assert state.ple is not None
        rows = ngram_step.hashed_rows(ids.contiguous(), state.ple.tokens, ple.multipliers, ple.sizes, ple.offsets, c.eos_token_id)
        mixed = self.project(ple.table(rows).flatten(1))
        return ngram_step.inject(mixed, streams, (ple.norms[0], ple.norms[1], ple.norms[2]), self.taps, state.ple.conv, c.ngram_size, norm, c.rms_norm_eps)
