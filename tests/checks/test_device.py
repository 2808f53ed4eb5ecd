"""GPUs as recorded: an H200 at rest and at work, an AMD card in sysfs, drivers that do not answer, and the cell's device against what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.checks import device as checks
from lab.checks.device import see_gpus
from tests.checks.support import (
    AMD,
    AMD_CARD,
    CPU,
    CUDA,
    GIB,
    H200_BUSY,
    H200_IDLE,
    H200_PROCESSES,
    HOST,
    NVIDIA_MODULE,
    absent,
    answers,
    machine,
    silent,
)

H200 = lambda: ("NVIDIA H200",)  # noqa: E731 - a seam


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_resting_h200_is_fine_and_its_low_clock_is_not_held_against_it(tmp_path: Path) -> None:
    seen = see_gpus(machine(tmp_path, ask=answers(H200_IDLE)))
    assert checks.driver(seen).found == "580.159.04 (nvidia-smi)"
    memory, clocks = checks.gpu_memory(seen), checks.gpu_clocks(seen)
    assert (memory.state, memory.found) == ("ok", "GPU 0 NVIDIA H200: 0 B of 140.4 GiB in use (nvidia-smi)")
    assert memory.values == {"processes": 0, "gpu0_used_bytes": 0, "gpu0_total_bytes": 143771 << 20}
    assert (clocks.state, clocks.found) == ("ok", "GPU 0 NVIDIA H200: 345 MHz (at most 1980), 33 C, 79 W (nvidia-smi)")
    assert clocks.values["gpu0_power_limit_w"] == 700


def test_an_h200_that_another_process_uses_and_a_cap_holds_down(tmp_path: Path) -> None:
    seen = see_gpus(machine(tmp_path, ask=answers(H200_BUSY, H200_PROCESSES)))
    memory, clocks = checks.gpu_memory(seen), checks.gpu_clocks(seen)
    assert memory.state == clocks.state == "warn"
    assert "used by python3 (pid 475, 4.9 GiB)" in memory.found and memory.fix.startswith("end them, or hide that GPU")
    assert "held down by: power cap (software)" in clocks.found and "compare only cells" in clocks.fix


def test_memory_in_use_counts_although_a_container_names_no_process(tmp_path: Path) -> None:
    found = checks.gpu_memory(see_gpus(machine(tmp_path, ask=answers(H200_BUSY))))
    assert (found.state, found.values["processes"]) == ("warn", 0)
    assert "left-over worker" in found.fix


@pytest.mark.parametrize(
    ("bits", "words"),
    [("0x0000000000000000", ""), ("0x0000000000000001", ""), ("0x0000000000000060", "too hot (software), too hot (hardware)"), ("[N/A]", "")],
)
def test_the_reasons_are_read_bit_by_bit(tmp_path: Path, bits: str, words: str) -> None:
    found = checks.gpu_clocks(see_gpus(machine(tmp_path, ask=answers(H200_IDLE.replace("0x0000000000000001", bits)))))
    assert (found.state == "warn") is bool(words)
    assert words in found.found


def test_a_lowered_power_limit_is_told(tmp_path: Path) -> None:
    found = checks.gpu_clocks(see_gpus(machine(tmp_path, ask=answers(H200_IDLE.replace("700.00, 700.00", "350.00, 700.00")))))
    assert found.state == "warn" and "power limit 350 W, by default 700 W" in found.found


def test_what_nvidia_smi_does_not_support_is_left_out_and_never_a_number(tmp_path: Path) -> None:
    row = "0, NVIDIA T4, 535.1, [N/A], [N/A], [Not Supported], [Not Supported], [N/A], [N/A], [N/A], [N/A], [Not Supported]\n"
    seen = see_gpus(machine(tmp_path, ask=answers(row)))
    memory, clocks = checks.gpu_memory(seen), checks.gpu_clocks(seen)
    assert (memory.state, memory.found, memory.values) == ("unknown", "nvidia-smi does not tell", {})
    assert (clocks.state, clocks.values) == ("unknown", {})


def test_an_amd_card_is_read_from_sysfs(tmp_path: Path) -> None:
    seen = see_gpus(machine(tmp_path, HOST | AMD))
    assert checks.driver(seen).found == "of kernel 6.14.0-33-generic (sysfs)"
    memory, clocks = checks.gpu_memory(seen), checks.gpu_clocks(seen)
    assert memory.state == "warn"
    assert memory.found == "card1 AMD 0x7551: 29.0 GiB of 32.0 GiB in use (sysfs); used by VLLM::Worker (pid 4711, 28.0 GiB)"
    assert (clocks.state, clocks.found) == ("ok", "card1 AMD 0x7551: 1024 MHz (at most 2350), 41 C, 18 W (sysfs)")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("power_dpm_force_performance_level", "low", "power_dpm_force_performance_level is low"),
        ("hwmon/hwmon3/power1_cap", "210000000", "power limit 210 W, by default 300 W"),
    ],
)
def test_what_holds_an_amd_card_down_is_told(tmp_path: Path, file: str, text: str, words: str) -> None:
    found = checks.gpu_clocks(see_gpus(machine(tmp_path, HOST | AMD | {f"{AMD_CARD}/{file}": text})))
    assert found.state == "warn" and words in found.found


def test_a_driver_that_does_not_answer_is_unknown_and_a_mismatch_needs_a_reboot(tmp_path: Path) -> None:
    files = HOST | {"proc/driver/nvidia/version": NVIDIA_MODULE}
    hung = see_gpus(machine(tmp_path, files, ask=silent("nvidia-smi did not answer within 3 s")))
    assert checks.driver(hung).state == "unknown"
    assert checks.driver(hung).found == "580.159.04 (nvidia-smi), but nvidia-smi did not answer within 3 s"
    assert checks.gpu_memory(hung).found == checks.gpu_clocks(hung).found == "nvidia-smi did not answer within 3 s"
    mismatch = see_gpus(machine(tmp_path, files, ask=silent("nvidia-smi ended with exit code 18: Driver/library version mismatch")))
    assert checks.driver(mismatch).state == "warn" and checks.driver(mismatch).fix.startswith("reboot")


def test_nothing_is_seen_where_nothing_is_installed_but_a_loaded_driver_is_missed(tmp_path: Path) -> None:
    assert see_gpus(machine(tmp_path / "none")) == ()
    (one,) = see_gpus(machine(tmp_path / "module", {"proc/driver/nvidia/version": NVIDIA_MODULE}, ask=absent))
    assert (one.driver, one.trouble) == ("580.159.04", "nvidia-smi is not installed")


@given(st.text(), st.text())
def test_no_answer_of_a_tool_raises(cards: str, processes: str) -> None:
    seen = see_gpus(machine(Path("/nonexistent"), {}, ask=answers(cards, processes)))
    for found in (checks.driver(seen), checks.gpu_memory(seen), checks.gpu_clocks(seen)):
        assert not found.found.startswith("could not look"), found


def test_the_cells_device_must_be_there(tmp_path: Path) -> None:
    missing = checks.device(machine(tmp_path), CUDA)
    assert missing.state == "bad" and "no GPU" in missing.found and "device=cpu" in missing.fix
    assert checks.device(machine(tmp_path), CPU).state == "ok"
    assert checks.device(machine(tmp_path), None).found.endswith("no GPU (the kernel's files)")
    assert checks.device(machine(tmp_path, accelerators=H200), CUDA).found == "NVIDIA H200 (the kernel's files)"
    assert checks.device(machine(tmp_path / "wsl", {"dev/dxg": ""}), CUDA).state == "unknown"


def test_another_card_than_expected_is_refused(tmp_path: Path) -> None:
    expecting = CUDA.model_copy(update={"name": "r9700", "expect": "gfx ?120001|r9700"})
    other = checks.device(machine(tmp_path, accelerators=H200), expecting)
    assert other.state == "bad" and other.found.endswith("device=r9700 expects /gfx ?120001|r9700/")
    assert checks.device(machine(tmp_path, accelerators=lambda: ("AMD gfx 120001",)), expecting).state == "ok"
    assert checks.device(machine(tmp_path, accelerators=lambda: ("AMD Radeon AI PRO R9700",)), expecting).state == "ok"


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_hidden_gpu_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = checks.device(machine(tmp_path, accelerators=H200), CUDA)
    assert found.state == "bad" and found.fix.startswith("unset CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(checks, "auto_device", lambda: "cpu")
    assert checks.auto(machine(tmp_path, accelerators=H200)).found == f"device=auto is cpu; CUDA_VISIBLE_DEVICES={value} hides every GPU"


def test_a_gpu_that_this_torch_cannot_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "auto_device", lambda: "cpu")
    found = checks.auto(machine(tmp_path, accelerators=H200))
    assert found.state == "warn" and "TORCH_INDEX" in found.fix
    assert checks.auto(machine(tmp_path)).state == "ok"


def test_memory_of_several_cards_is_told_for_each(tmp_path: Path) -> None:
    found = checks.gpu_memory(see_gpus(machine(tmp_path, HOST | AMD, ask=answers(H200_IDLE))))
    assert found.values["gpu0_used_bytes"] == 0 and found.values["gpu1_used_bytes"] == 29 * GIB
    assert found.found.startswith("GPU 0 NVIDIA H200: 0 B") and "(nvidia-smi, sysfs)" in found.found
