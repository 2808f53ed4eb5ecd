"""The host as its files tell it: memory and its limits, swap, neighbours, cores and quotas, clocks, pinned memory, kills for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.checks import host
from lab.checks.cgroup import oom_kills
from tests.checks.support import CPU, GIB, HOST, MEMINFO, QUIET, machine

V2 = {"proc/self/cgroup": "0::/lab/job"}
V1 = {"proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc"}


def test_memory_is_what_the_kernel_estimates(tmp_path: Path) -> None:
    found = host.memory(machine(tmp_path))
    assert (found.state, found.values) == ("ok", {"available_bytes": 12 * GIB, "total_bytes": 16 * GIB})
    assert found.found == "12.0 GiB of 16.0 GiB available (/proc/meminfo)"


@pytest.mark.parametrize(
    "limits",
    [
        V2
        | {
            "sys/fs/cgroup/lab/memory.max": f"{4 * GIB}",
            "sys/fs/cgroup/lab/memory.current": f"{3 * GIB + GIB // 2}",
            "sys/fs/cgroup/lab/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}",
            "sys/fs/cgroup/lab/job/memory.max": "max",
            "sys/fs/cgroup/lab/job/memory.current": "1",
        },
        # A container whose own group lies at the root of what it sees, while /proc names the host's path.
        V1
        | {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB + GIB // 2}",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}",
        },
    ],
    ids=["v2, limit of the group above", "v1"],
)
def test_a_containers_limit_counts_without_the_file_cache(tmp_path: Path, limits: dict[str, str]) -> None:
    found = host.memory(machine(tmp_path, HOST | limits))
    assert (found.state, found.values["available_bytes"], found.values["limit_bytes"]) == ("warn", GIB, 4 * GIB)
    assert "--memory" in found.fix


def test_no_limit_in_version_1_is_a_very_large_number(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712", "sys/fs/cgroup/memory/memory.usage_in_bytes": "5"}
    assert "limit_bytes" not in host.memory(machine(tmp_path, HOST | V1 | files)).values


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        (V2 | {"sys/fs/cgroup/lab/job/memory.events": "oom 9\noom_kill 2\noom_group_kill 1", "sys/fs/cgroup/lab/memory.events": "oom_kill 7"}, 2),
        (V2 | {"sys/fs/cgroup/memory.events": "oom_kill 4"}, 4),
        (V1 | {"sys/fs/cgroup/memory/docker/abc/memory.oom_control": "under_oom 0\noom_kill 3"}, 3),
        (V1 | {"sys/fs/cgroup/memory/memory.oom_control": "under_oom 0"}, None),
        ({}, None),
    ],
    ids=["v2, its own group", "v2, the container's root", "v1", "v1, a kernel that does not count", "no group"],
)
def test_kills_for_want_of_memory_are_those_of_the_nearest_group(tmp_path: Path, files: dict[str, str], kills: int | None) -> None:
    assert oom_kills(machine(tmp_path, files)) == kills


@pytest.mark.parametrize(("used_mib", "state"), [(0, "ok"), (200, "ok"), (300, "warn")])
def test_swap_in_use(tmp_path: Path, used_mib: int, state: str) -> None:
    total_kib = 4 << 20
    found = host.swap(machine(tmp_path, {"proc/meminfo": MEMINFO.format(swap=total_kib, free=total_kib - used_mib * 1024)}))
    assert (found.state, found.values["used_bytes"]) == (state, used_mib << 20)


@pytest.mark.parametrize(
    ("after", "state", "busy"),
    [
        (QUIET[1], "ok", 0.067),
        ("cpu  1025 0 101 5004 50 0 5 2 0 0\ncpu0 1\ncpu1 1\n", "warn", 1.733),
        ("cpu  1000 0 100 5010 50 0 5 22 0 0\ncpu0 1\ncpu1 1\n", "warn", 1.333),
        (QUIET[0], "unknown", None),
    ],
    ids=["quiet", "another process", "another guest", "a clock that stands"],
)
def test_what_others_do_is_sampled_and_the_load_average_only_told(tmp_path: Path, after: str, state: str, busy: float | None) -> None:
    files = HOST | {"proc/loadavg": "2.00 1.00 0.50 1/99 7"}
    found = host.load(machine(tmp_path, files, after=after))
    assert (found.state, found.values.get("busy_cores")) == (state, busy)
    assert "2.00" in found.found


def test_cores_are_told_and_more_threads_than_time_are_a_warning(tmp_path: Path) -> None:
    assert host.cores(machine(tmp_path), None).found == "2 of 2 cores usable (affinity), 2 threads"
    pinned = host.cores(machine(tmp_path, cores=lambda: {1}), CPU)
    assert (pinned.state, pinned.values) == ("ok", {"usable": 1, "present": 2, "threads": 1})
    crowded = host.cores(machine(tmp_path, cores=lambda: {1}), CPU.model_copy(update={"threads": 2}))
    assert crowded.state == "warn" and crowded.fix.startswith("device.threads=1")


@pytest.mark.parametrize(
    "quota",
    [
        V2 | {"sys/fs/cgroup/lab/job/cpu.max": "150000 100000"},
        V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
    ],
    ids=["v2", "v1"],
)
def test_a_containers_quota_is_read(tmp_path: Path, quota: dict[str, str]) -> None:
    found = host.cores(machine(tmp_path, HOST | quota), CPU)
    assert (found.state, found.values["quota_cores"]) == ("warn", 1.5)
    assert found.fix.startswith("device.threads=1")
    assert host.cores(machine(tmp_path, HOST | quota), CPU.model_copy(update={"threads": 1})).state == "ok"


def test_no_quota_is_written_as_max_or_minus_one(tmp_path: Path) -> None:
    quota = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000", "sys/fs/cgroup/lab/cpu.max": "max 100000"}
    files = HOST | quota | {"proc/self/cgroup": "3:cpu:/\n0::/lab"}
    assert "quota_cores" not in host.cores(machine(tmp_path, files), CPU).values


def _clocks(governor: str, driver: str, allowed_khz: int) -> dict[str, str]:
    texts = {"scaling_governor": governor, "scaling_driver": driver, "scaling_max_freq": str(allowed_khz)}
    texts |= {"cpuinfo_max_freq": "3800000", "scaling_cur_freq": "1200000"}
    return {f"sys/devices/system/cpu/cpu{core}/cpufreq/{name}": text for core in (0, 1) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("governor", "driver", "allowed_khz", "state", "fix"),
    [
        ("performance", "acpi-cpufreq", 3800000, "ok", ""),
        ("powersave", "intel_pstate", 3800000, "ok", ""),
        ("powersave", "acpi-cpufreq", 3800000, "warn", "cpupower frequency-set -g performance"),
        ("schedutil", "acpi-cpufreq", 2000000, "warn", "cpupower frequency-set -u 3800MHz"),
    ],
)
def test_governor_and_clock_limit(tmp_path: Path, governor: str, driver: str, allowed_khz: int, state: str, fix: str) -> None:
    found = host.cpu_clocks(machine(tmp_path, _clocks(governor, driver, allowed_khz)))
    assert found.state == state and found.fix.startswith(fix)
    assert found.values == {"now_mhz": 1200, "allowed_mhz": allowed_khz / 1000, "possible_mhz": 3800}


def test_a_virtual_machine_has_no_clocks_to_tell(tmp_path: Path) -> None:
    assert host.cpu_clocks(machine(tmp_path)).state == "unknown"


def test_pinned_memory_matters_where_there_is_a_gpu(tmp_path: Path) -> None:
    small = machine(tmp_path, lockable_bytes=lambda: 64 * 1024)
    found = host.memlock(small, True)
    assert (found.state, found.values) == ("warn", {"limit_bytes": 65536})
    assert found.found.startswith("64 KiB") and "--ulimit memlock=-1" in found.fix
    assert host.memlock(small, False).state == "ok"
    assert host.memlock(machine(tmp_path, lockable_bytes=lambda: 64 * GIB), True).state == "ok"
    assert host.memlock(machine(tmp_path), True).found == "unlimited (RLIMIT_MEMLOCK)"


def test_a_machine_without_such_files_is_unknown_and_never_a_number(tmp_path: Path) -> None:
    bare = machine(tmp_path, {})
    for found in (host.memory(bare), host.swap(bare), host.load(bare), host.cpu_clocks(bare)):
        assert (found.state, found.values) == ("unknown", {}), found


@given(st.fixed_dictionaries({}, optional={name: st.text(max_size=60) for name in ("proc/meminfo", "proc/stat", "proc/loadavg", "proc/self/cgroup")}))
def test_no_content_of_a_file_raises(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> None:
    strange = machine(tmp_path_factory.mktemp("m"), {name: text.encode("utf-8", "replace").decode() for name, text in files.items()})
    for found in (host.memory(strange), host.swap(strange), host.load(strange), host.cores(strange, CPU), host.memlock(strange, True)):
        assert found.name and found.found
    oom_kills(strange)
