"""Weight-space quality: cosine, relative error, and a self-check that a loaded encoding still is the weight it came from.

Why norms beside the cosine: a decode that drops a per-row scale keeps every row's direction, so each row's cosine stays high while its
length is wrong; that happened (a 2-bit table read without its row scale gave PPL 142.6) and only the norms show it.
What it does not prove: output quality. Weight cosine ranks codecs on one tensor; perplexity and divergence decide.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.codecs.base import Codec, Parts, take
from lab.errors import LabError

_PIECE = 1 << 22  # elements cast to float64 at a time


def _dots(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """(a.b, a.a, b.b) summed in float64, piece by piece."""
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    ab = aa = bb = 0.0
    for x, y in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        x64, y64 = x.to(torch.float64), y.to(torch.float64)
        ab, aa, bb = ab + float(x64 @ y64), aa + float(x64 @ x64), bb + float(y64 @ y64)
    return ab, aa, bb


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors of one shape seen as vectors, float64 sums. Two zero tensors give 1, one zero tensor 0."""
    ab, aa, bb = _dots(a, b)
    if aa == 0.0 or bb == 0.0:
        return 1.0 if aa == bb else 0.0
    return float(ab / (aa * bb) ** 0.5)


def relative_mse(approx: Tensor, exact: Tensor) -> float:
    """|approx - exact|^2 / |exact|^2, float64 sums. 0 when both are zero, infinity when only `exact` is."""
    if approx.shape != exact.shape:
        raise ValueError(f"shapes differ: {list(approx.shape)} and {list(exact.shape)}")
    err = relative = 0.0
    for x, y in zip(approx.reshape(-1).split(_PIECE), exact.reshape(-1).split(_PIECE), strict=True):
        y64 = y.to(torch.float64)
        diff = x.to(torch.float64) - y64
        err, relative = err + float(diff @ diff), relative + float(y64 @ y64)
    return err / relative if relative else (0.0 if err == 0.0 else float("inf"))


@dataclass(frozen=True)
class EncodingCheck:
    """What `verify_encoding` measured: `ok`, or the reason why not."""

    cosine: float  # over the sample
    norm_error: float  # |n_decoded - n| / |n| where n is the vector of row norms
    rows: int  # rows compared
    reason: str = ""  # empty when ok

    @property
    def ok(self) -> bool:
        return not self.reason

    def require(self, what: str) -> None:
        """Raises LabError naming the tensor `what` unless the check passed."""
        if self.reason:
            raise LabError(f"{what}: {self.reason}; the encoding does not decode to its weight")


def verify_encoding(
    codec: Codec,
    parts: Parts,
    weight: Tensor,
    min_cosine: float | None = None,
    max_rel_norm_error: float | None = None,
    sample_rows: int = 128,
) -> EncodingCheck:
    """Decode a spread of matrices and rows and compare them with `weight` [..., rows, cols] (any floating dtype, same device as the parts).

    Limits default to the codec's `plausible` pair. At most 4 stacked matrices are read and `sample_rows` rows in all are compared, so that
    the check costs little at load. Does not see a fault confined to rows outside the sample. Raises ValueError where shapes disagree.
    """
    least, most = codec.plausible
    least = least if min_cosine is None else min_cosine
    most = most if max_rel_norm_error is None else max_rel_norm_error
    cols = weight.shape[-1]
    while weight.ndim > 3:
        weight, parts = weight.flatten(0, 1), {key: part.flatten(0, 1) for key, part in parts.items()}
    stacks = 1 if weight.ndim == 2 else min(4, weight.shape[0])
    got, want = [], []
    for position in _spread(weight.shape[0], stacks) if weight.ndim == 3 else [-1]:
        matrix, held = (weight, parts) if position < 0 else (weight[position], codec.select(parts, position))
        ids = torch.tensor(_spread(matrix.shape[0], max(1, sample_rows // stacks)), device=matrix.device)
        got.append(codec.decode(codec.take_rows(held, ids), cols))
        want.append(take(matrix, ids).to(torch.float32))
    decoded, exact = torch.cat(got), torch.cat(want)
    if decoded.shape != exact.shape:
        raise ValueError(f"codec {codec.name}: decodes to {list(decoded.shape)}, the weight sample is {list(exact.shape)}")
    similarity = cosine(decoded, exact)
    norm_error = relative_mse(decoded.double().norm(dim=-1), exact.double().norm(dim=-1)) ** 0.5
    reason = ""
    if not similarity >= least:  # written so that NaN fails
        reason = f"codec {codec.name}: cosine {similarity:.4f} is below {least}"
    elif not norm_error <= most:
        reason = f"codec {codec.name}: row norms are off by {norm_error:.1%}, more than {most:.1%} (a scale was dropped or applied twice?)"
    return EncodingCheck(similarity, norm_error, len(exact), reason)


def _spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` positions spread over range(count), ends included."""
    wanted = min(count, wanted)
    return [0] if wanted == 1 else [i * (count - 1) // (wanted - 1) for i in range(wanted)]


def checksum(parts: Parts) -> int:
    """0 .. 2^64 - 1 from the names, shapes, types and bytes of all parts and the bytes' places; equal on every device.

    Each word is mixed with its place (multiplications and shifts as in splitmix64: Steele, Lea, Flood 2014) and the mixed words are added up: 64-bit integers
    that wrap give the same sum in any order. One number that two records can be compared by; it guards against accidents, not against intent.
    """
    total = 0
    for name, part in sorted(parts.items()):
        head = hashlib.sha256(f"{name} {part.dtype} {list(part.shape)}".encode()).digest()
        total = total * 31 + int.from_bytes(head[:8], "little")
        flat = part.reshape(-1).contiguous().view(torch.uint8)
        words = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
        for start in range(0, len(words), _PIECE):
            piece = words[start : start + _PIECE]
            place = torch.arange(start + 1, start + 1 + len(piece), device=piece.device)
            total += int(_mixed(piece ^ _mixed(place)).sum())
    return total % 2**64


def _mixed(words: Tensor) -> Tensor:
    """int64 [n] -> int64 [n], one to one, where each bit depends on all others."""
    words = words * -7046029254386353131  # 2^64 divided by the golden ratio, odd, as int64
    words = (words ^ _shifted(words, 30)) * -4658895280553007687
    words = (words ^ _shifted(words, 27)) * -7723592293110705685
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, places: int) -> Tensor:
    """To the right with zeros from the left, as of unsigned numbers: with the sign a word and its complement would be mixed alike."""
    return (words >> places) & ((1 << (64 - places)) - 1)
