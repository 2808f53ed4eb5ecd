"""The capacity ledger of one cell: what lies where in bytes, what a token reads and computes, and the bounds that follow.

Plain data, so that it goes through JSON, into a record and a report. It is counted from sizes and codecs, nothing was loaded; it does not prove that the
allocator needs no more, which is why a real out-of-memory raises later estimates (`lab.capacity.past`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ACCOUNT_PARTS = ("experts", "trunk", "ple", "head", "embed", "small", "vectors")
"""The components a ledger knows. Beside those a path chooses: `embed` is the token embedding, `small` the routers and other narrow matrices,
`vectors` norms, taps and decays."""

Place = Literal["device", "host"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Line(_Frozen):
    """One component in one encoding at one place. `copy_of_host` marks a cache of weights that another line counts."""

    component: str
    codec: str
    placement: str
    where: Place
    weights: int
    bytes: int
    copy_of_host: bool = False


class Workspace(_Frozen):
    """Memory beside weights and state, estimated: the largest moment of loading and scoring. `basis` says which."""

    device_bytes: int
    host_bytes: int
    basis: str


class Experts(_Frozen):
    """The routed experts of a model: in how many layers, how many per layer, how many one token uses, bytes of one expert in its codec."""

    layers: int
    count: int
    per_token: int
    bytes_each: int


class Reads(_Frozen):
    """Bytes moved for one decoded token of one sequence: read on the device, fetched over the bus, read in host memory by the CPU. With experts kept in part
    an estimate: requests hit in proportion to the slots."""

    device_bytes: float
    bus_bytes: float
    host_bytes: float


class Residency(_Frozen):
    """How many of a place's weights stay there, predicted: `kept` of `total` of `what`, bytes of all of them, and the limit that cuts them off."""

    what: str
    where: Place
    kept: int
    total: int
    needed_bytes: int
    limit: str

    @property
    def degrades(self) -> bool:
        """Whether a run is predicted to end as DEGRADED: a strip cache does not hold everything, and the rest is rebuilt while running."""
        return self.what == "weights" and self.kept < self.total


class Ledger(_Frozen):
    """See the module. `one_memory`: device and host share the same memory. Rates are tokens per second, None where the device has no figures. A bound holds
    for any text, and what lies above it is wrong; an estimate spreads requests evenly over experts, which real text does not, and judges nothing. `assumed`:
    `component: type` where only the file knows its types and is not at hand."""

    model: str
    path: str
    device: str
    layers: int
    one_memory: bool
    lines: tuple[Line, ...]
    state_bytes: int
    state_basis: str
    workspace: Workspace
    experts: Experts | None = None
    residency: tuple[Residency, ...] = ()
    device_limit_bytes: int | None = None
    host_limit_bytes: int | None = None
    decode_bytes_per_token: Reads
    flops_per_token: float
    tg_bound_tok_s: float | None = Field(default=None, gt=0)
    agg4_bound_tok_s: float | None = Field(default=None, gt=0)
    pp_bound_tok_s: float | None = Field(default=None, gt=0)
    basis: str
    tg_estimate_tok_s: float | None = Field(default=None, gt=0)
    agg4_estimate_tok_s: float | None = Field(default=None, gt=0)
    pp_estimate_tok_s: float | None = Field(default=None, gt=0)
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def weight_bytes(self, where: Place) -> int:
        """Bytes of all weights at one place."""
        return sum(line.bytes for line in self.lines if line.where == where)

    @property
    def device_bytes(self) -> int:
        """Everything on the device: weights, state and workspace."""
        return self.weight_bytes("device") + self.state_bytes + self.workspace.device_bytes

    @property
    def host_bytes(self) -> int:
        """Everything in host memory: weights and workspace."""
        return self.weight_bytes("host") + self.workspace.host_bytes

    @property
    def bounds_tok_s(self) -> tuple[float | None, float | None, float | None]:
        """Of decoding alone, of four sequences together and of prefill."""
        return self.tg_bound_tok_s, self.agg4_bound_tok_s, self.pp_bound_tok_s

    @property
    def estimates_tok_s(self) -> tuple[float | None, float | None, float | None]:
        """The same three, estimated."""
        return self.tg_estimate_tok_s, self.agg4_estimate_tok_s, self.pp_estimate_tok_s

    def weights(self) -> dict[str, int]:
        """Weights by component, each once."""
        found: dict[str, int] = {}
        for line in self.lines:
            if not line.copy_of_host:
                found[line.component] = found.get(line.component, 0) + line.weights
        return found


class NoLedger(_Frozen):
    """Why a cell has no ledger, in one line."""

    reason: str
