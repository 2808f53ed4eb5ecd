"""Which card a result may be stored under."""

from __future__ import annotations

import pytest

from lab.assemble import other_device
from lab.cell import Cell, DeviceSpec
from lab.record import Status, WorkerResult
from tests.matrix_helpers import cell

R9700 = DeviceSpec(name="r9700", torch_device="cuda", compute_dtype="bfloat16", expect="gfx ?1201|R9700", memory_bytes=32 << 30)


def on(device: DeviceSpec) -> Cell:
    return cell().model_copy(update={"device": device})


def ran_on(**environment: object) -> WorkerResult:
    return WorkerResult(status=Status.OK, environment=dict(environment))


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"gpu": "AMD Radeon AI PRO R9700", "gpu_memory_bytes": 31 << 30}, None),
        ({"gpu": "AMD Radeon Graphics", "gpu_arch": "gfx1201", "gpu_memory_bytes": 31 << 30}, None),
        (
            {"gpu": "AMD Radeon RX 9070 XT", "gpu_arch": "gfx1201", "gpu_memory_bytes": 16 << 30},
            "16.0 GiB, but device=r9700 has 32.0 GiB: another card",
        ),
        ({"gpu": "NVIDIA H200", "gpu_memory_bytes": 139 << 30}, "it ran on NVIDIA H200, which is not device=r9700"),
    ],
)
def test_the_card_that_ran_must_be_the_one_that_the_cell_names(environment: dict[str, object], problem: str | None) -> None:
    found = other_device(on(R9700), ran_on(**environment))
    assert (found is None) == (problem is None)
    if found is not None and problem is not None:
        assert found[0] is Status.INFRA and problem in found[1]


def test_a_device_that_expects_nothing_takes_any_card() -> None:
    anything = DeviceSpec(name="cuda", torch_device="cuda", compute_dtype="bfloat16")
    assert other_device(on(anything), ran_on(gpu="NVIDIA H200")) is None
    assert other_device(on(R9700), ran_on(torch="2.11")) is None, "a result that names no card came from another engine"
