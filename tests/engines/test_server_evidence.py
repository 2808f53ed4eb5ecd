"""The evidence of a server: each rule fires on what it is for, and what a server says of itself is only kept."""

from __future__ import annotations

from typing import Any

import pytest

from lab.cell import ServerSpec
from lab.engines.server.address import address
from lab.engines.server.client import Client
from lab.engines.server.facts import Drafts, listed_models, said_of_itself
from lab.engines.server_evidence import check
from lab.errors import LabError
from lab.record import Status
from tests.engines.fake_server import Behaviour, serving
from tests.engines.helpers import cell_for

CELL = cell_for("http://127.0.0.1:1/v1", model="big")
SERVER = {"model": "big", "models_answered": ["big"]}
REQUESTS = {"ok": 30, "failed": 0, "failures": [], "cached_tokens_max": 0}


def test_good_evidence_has_no_finding() -> None:
    assert check(CELL, {"server": SERVER, "requests": REQUESTS}) == []
    assert check(CELL, {"server": SERVER, "requests": REQUESTS | {"cached_tokens_max": 2}}) == []


@pytest.mark.parametrize(
    ("server", "requests", "status", "reason"),
    [
        ({}, {"ok": 0, "failed": 1, "failures": [("TIMEOUT", "late")]}, Status.PATH_NOT_EXECUTED, "no request was answered"),
        ({"models_answered": []}, {}, Status.PATH_NOT_EXECUTED, "no answer named its model"),
        ({"models_answered": ["big", "small"]}, {}, Status.PATH_NOT_EXECUTED, "small answered where big was asked"),
        # What was asked is the cell's word, whatever the worker says.
        ({"model": "small", "models_answered": ["small"]}, {}, Status.PATH_NOT_EXECUTED, "small answered where big was asked"),
        ({}, {"failed": 2, "failures": [("CRASHED", "HTTP 500"), ("TIMEOUT", "late")]}, Status.CRASHED, "2 of 32 requests failed; the first: HTTP 500"),
        ({}, {"failed": 1, "failures": [("TIMEOUT", "late")]}, Status.TIMEOUT, "1 of 31 requests failed"),
        ({}, {"cached_tokens_max": 9}, Status.IMPLAUSIBLE, "9 tokens of a fresh prompt"),
    ],
)
def test_each_rule_fires(server: dict[str, Any], requests: dict[str, Any], status: Status, reason: str) -> None:
    found = check(CELL, {"server": SERVER | server, "requests": REQUESTS | requests})
    assert found[0][0] is status
    assert reason in found[0][1]


@pytest.mark.parametrize("left_out", ["server", "requests"])
def test_missing_evidence_is_a_finding(left_out: str) -> None:
    whole = {"server": SERVER, "requests": REQUESTS}
    assert left_out in check(CELL, {key: value for key, value in whole.items() if key != left_out})[0][1]


def test_a_servers_words_are_kept_short_and_a_missing_route_is_left_out() -> None:
    with serving(Behaviour()) as running, Client(ServerSpec(url=f"http://127.0.0.1:{running.server_port}/v1")) as client:
        assert listed_models(client) == ["fake-model"]
        assert said_of_itself(client) == {"/version": {"version": "0.0-fake"}}
        assert Drafts.read(client) == Drafts(None, None)
        assert client.ask("http://127.0.0.1:1/nothing") is None


def test_drafts_are_the_difference_of_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        '# HELP vllm:spec_decode_num_draft_tokens_total n\nvllm:spec_decode_num_draft_tokens_total{{engine="0"}} {d}\n'
        'vllm:spec_decode_num_draft_tokens_total{{engine="1"}} 10.0\nvllm:spec_decode_num_draft_tokens_created{{engine="0"}} 1.7e9\n'
        'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {a}\nvllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0"}} 3.0\n'
    )
    pages = iter([page.format(d=30.0, a=15.0), page.format(d=130.0, a=75.0)])
    with Client(ServerSpec()) as client:
        monkeypatch.setattr(client, "ask", lambda url: next(pages))
        before, after = Drafts.read(client), Drafts.read(client)
    assert before == Drafts(40.0, 15.0)
    assert after.since(before) == {"server_drafted_tokens": 100.0, "server_accepted_tokens": 60.0, "acceptance": 0.6}
    assert before.since(before) == {}
    assert before.since(Drafts()) == {}


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000/v1", "ftp://host/v1", "http:///v1", "http://host:99999/v1", "http://host:port/v1", "http://host/v1?key=1"])
def test_a_wrong_address_is_one_line(url: str) -> None:
    with pytest.raises(LabError, match=r"path\.server\.url=.*: must be an http address"):
        address(url)


def test_an_address_is_taken_apart() -> None:
    found = address("https://gpu.example:8443/v1/")
    assert (found.api, found.root, found.host, found.port) == ("https://gpu.example:8443/v1", "https://gpu.example:8443", "gpu.example", 8443)
    assert address("http://host/v1").port == 80
