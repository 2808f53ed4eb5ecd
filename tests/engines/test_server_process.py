"""A server that the lab starts: told what the path says, waited for, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.cell import ServerSpec
from lab.engines.server import process as server_process
from lab.engines.server.address import address
from lab.engines.server.process import ServerProcess, start_command
from lab.errors import GapError, LabError
from lab.record import Status
from tests.engines.fake_server import Behaviour, serving
from tests.engines.helpers import attempt, cell_for, free_port
from tests.runner_helpers import ROOT, is_gone, until

COMMAND = (sys.executable, "-m", "tests.engines.fake_server", "--port", "{port}", "--layers", "{layers}")
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "FAKE_WEIGHTS": "good weights"}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "GRACE_S", 0.5)


def test_a_started_server_is_measured_and_ended(tmp_path: Path) -> None:
    port = free_port()
    result = attempt(cell_for(f"http://127.0.0.1:{port}/v1", command=COMMAND, environment=ENVIRONMENT), tmp_path)
    assert result.status is Status.OK, result.reason
    assert {"load_s", "pp512_tok_s", "tg128_tok_s"} == set(result.metrics) - {"agg4_tg128_tok_s"}
    # On a loaded machine four streams may truly not run side by side, and then the lab says so.
    assert "agg4_tg128_tok_s" in result.metrics or "requests sent together" in result.gaps["agg4_tg128_tok_s"][1]
    assert 0 < result.metrics["load_s"].value < 20
    server = result.evidence["server"]
    assert server["layers_passed"]
    assert server["command"][-3:] == [str(port), "--layers", "3"]
    assert result.notes == ["lossy switches of this stack: fp8 KV cache"]
    assert not listening(port)


def test_a_server_that_fails_to_load_leaves_its_last_words(tmp_path: Path) -> None:
    cell = cell_for(f"http://127.0.0.1:{free_port()}/v1", command=(*COMMAND, "--fail-loading"), environment=ENVIRONMENT)
    result = attempt(cell, tmp_path)
    assert result.status is Status.LOAD_FAILED
    assert "exit code 1" in result.reason
    assert "loading good weights, 3 layers | weights: tensor blk.3 is missing" in result.reason


def test_a_server_that_dies_while_it_is_measured_takes_the_attempt_with_it(tmp_path: Path) -> None:
    cell = cell_for(f"http://127.0.0.1:{free_port()}/v1", command=(*COMMAND, "--die-at", "12"), environment=ENVIRONMENT)
    result = attempt(cell, tmp_path)
    assert result.status is Status.CRASHED
    assert "exit code 3" in result.reason
    assert "a page fault" in result.reason
    assert result.evidence["requests"]["failed"] >= 1


def test_a_server_of_someone_else_that_dies_is_gone_too(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.engines.fake_server", "--port", str(port), "--die-at", "12"]
    with subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL) as other:
        until(lambda: listening(port), None)
        result = attempt(cell_for(f"http://127.0.0.1:{port}/v1"), tmp_path)
        assert other.wait(10) == 3
    assert result.status is Status.CRASHED
    assert result.reason.startswith("the server is gone (health: ")
    # What was found before is told to the parent, which admits nothing of it.
    assert "tg128_tok_s" in result.metrics


def test_a_server_that_is_never_ready_is_a_timeout(tmp_path: Path) -> None:
    cell = cell_for(f"http://127.0.0.1:{free_port()}/v1", command=COMMAND, environment=ENVIRONMENT, health="/ready", start_timeout_s=2.0)
    result = attempt(cell, tmp_path)
    assert result.status is Status.TIMEOUT
    assert "health: HTTP 404" in result.reason
    assert "start_timeout_s=2 s" in result.reason


def test_a_taken_port_is_not_measured_by_mistake(tmp_path: Path) -> None:
    with serving(Behaviour()) as other:
        cell = cell_for(f"http://127.0.0.1:{other.server_port}/v1", command=COMMAND, environment=ENVIRONMENT)
        result = attempt(cell, tmp_path)
    assert result.status is Status.INFRA
    assert "listens" in result.reason


def test_a_program_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = attempt(cell_for(f"http://127.0.0.1:{free_port()}/v1", command=("no-such-server",)), tmp_path)
    assert result.status is Status.LOAD_FAILED
    assert result.reason == "path.server.command: no-such-server cannot be started: No such file or directory"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_an_orphan_in_a_group_of_its_own_that_ignores_sigterm_is_ended_too(tmp_path: Path) -> None:
    sign = tmp_path / "child"
    where = address(f"http://127.0.0.1:{free_port()}/v1")
    command = [sys.executable, "-m", "tests.engines.fake_server", "--port", str(where.port), "--hiding-child", str(sign)]
    with ServerProcess(command, ENVIRONMENT, where, tmp_path) as server:
        until(lambda: sign.exists() and sign.read_text())
        child = int(sign.read_text())
        assert os.getsid(child) == child
    assert is_gone(child)
    assert is_gone(server.process.pid)
    assert not server.left_running


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_a_request_to_end_during_the_grace_still_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / "child"
    where = address(f"http://127.0.0.1:{free_port()}/v1")
    command = [sys.executable, "-m", "tests.engines.fake_server", "--port", str(where.port), "--hiding-child", str(sign)]
    waits = []
    wait = psutil.wait_procs

    def interrupted(*args: Any, **options: Any) -> Any:
        waits.append(1)
        if len(waits) == 1:
            raise SystemExit(143)
        return wait(*args, **options)

    monkeypatch.setattr(server_process.psutil, "wait_procs", interrupted)
    monkeypatch.setattr(server_process, "HURRIED_GRACE_S", 0.3)
    with pytest.raises(SystemExit), ServerProcess(command, ENVIRONMENT, where, tmp_path) as server:
        until(lambda: sign.exists() and sign.read_text())
    assert is_gone(int(sign.read_text()))
    assert is_gone(server.process.pid)


def test_a_worker_asked_to_end_ends_its_server_first(tmp_path: Path) -> None:
    sign, port = tmp_path / "child", free_port()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.engines.helpers import attempt, cell_for, free_port\n"
        "from tests.engines.test_server_process import COMMAND, ENVIRONMENT\n"
        "command = (*COMMAND, '--hiding-child', sys.argv[2])\n"
        "attempt(cell_for(f'http://127.0.0.1:{sys.argv[3]}/v1', command=command, environment=ENVIRONMENT, health='/never'), Path(sys.argv[1]))"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(sign), str(port)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    until(lambda: sign.exists() and sign.read_text() and listening(port), None)
    child = int(sign.read_text())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 128 + signal.SIGTERM
    assert not listening(port)
    if sys.platform == "linux":
        assert is_gone(child)
    elif psutil.pid_exists(child):
        os.kill(child, signal.SIGKILL)


@given(st.integers(1, 99), st.integers(1, 65535), st.lists(st.text('ab-={} ":0,', max_size=20)))
def test_only_known_names_in_braces_are_filled(layers: int, port: int, others: list[str]) -> None:
    plain = [word for word in others if "{a" not in word and "{b" not in word and "{0" not in word]
    spec = ServerSpec(command=("serve", "{artifact}", '{"layers": {layers}}', "--port={port}", *plain))
    words = start_command(spec, Path("model"), layers, port, 2)
    assert words == ["serve", "model", f'{{"layers": {layers}}}', f"--port={port}", *plain]


def test_an_unknown_name_in_braces_and_a_taken_address_are_said() -> None:
    with pytest.raises(LabError, match=r"\{weights\}.*known: \{artifact\}"):
        start_command(ServerSpec(command=("serve", "{weights}")), Path("model"), 1, 1, 1)
    with serving(Behaviour()) as other:
        where = address(f"http://127.0.0.1:{other.server_port}/v1")
        with pytest.raises(GapError, match="listens"), ServerProcess(["true"], {}, where, Path()):
            pass


def listening(port: int) -> bool:
    """Whether someone answers on the port."""
    return server_process._answers(address(f"http://127.0.0.1:{port}/v1"))
