"""Memory beside weights and state, estimated for the local engine: scoring, decoding a large matrix, encoding while loading.

Each is the size of the largest tensors that exist together at that moment, read off the engine's code; the largest of the three counts, because they do not
happen at once. Fragmentation, the runtime's own memory and kernels' scratch space are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.capacity.ledger import Workspace
from lab.capacity.sizes import ModelSizes
from lab.capacity.storage import Stored
from lab.cell import Cell
from lab.measure.divergence import MAX_WINDOWS
from lab.measure.reference import BATCH

_SCORE_COPIES = 3
"""Logits, the scored ones among them, and their log-probabilities, all float32 (`lab.measure.scoring`)."""
_STREAM_COPIES = 8
"""Activations of the widest row alive in one layer: input, normed, mixed, gates, output and their float32 versions."""


def workspace(cell: Cell, sizes: ModelSizes, tensors: Sequence[Stored], activation_bytes: int) -> Workspace:
    """The estimate, with `activation_bytes` per number of an activation."""
    bench = cell.bench
    tokens = BATCH * bench.ppl_context
    scores = 4 * tokens * sizes.vocab_size
    on_device = [t for t in tensors if t.placement == "device" and t.weight.kind in ("matrix", "experts")]
    head = max((4 * t.weight.count for t in on_device if t.weight.component == "head"), default=0)
    # A tensor is encoded where it will lie, from its 16-bit source, beside what is already encoded.
    loading = max((2 * t.weight.count for t in on_device if t.encoding.name != "bf16"), default=0)
    moments = {
        f"scoring {BATCH} windows of {bench.ppl_context} tokens: {_SCORE_COPIES} float32 copies of their scores": _SCORE_COPIES * scores,
        "the head decoded to float32, and one copy of the scores": scores + head,
        "loading: the largest tensor in 16 bits while it is encoded": loading,
    }
    largest = max(moments, key=lambda name: moments[name])
    activations = _STREAM_COPIES * tokens * sizes.widest * activation_bytes
    windows = min(bench.ppl_windows, MAX_WINDOWS)
    reference = 4 * sizes.vocab_size * (bench.ppl_context + (windows - 1) * bench.ppl_stride)
    source = max(2 * t.weight.count for t in tensors if t.weight.kind in ("matrix", "experts"))
    return Workspace(
        device_bytes=moments[largest] + activations,
        host_bytes=reference + source,
        basis=f"estimated for the local engine. Device: {largest}, and activations. Host: the reference's log-probabilities of {windows} windows, and the"
        " largest source tensor",
    )
