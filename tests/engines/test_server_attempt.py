"""A whole attempt against the fake server: good numbers when all is well, and for every fault the gap or the finding that is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.admission import Decision, decide
from lab.engines.server_evidence import check
from lab.record import Status, WorkerResult
from tests.engines.fake_server import Behaviour, serving
from tests.engines.helpers import attempt, cell_for, free_port
from tests.runner_helpers import ROOT

SPEED = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s")


def run(behaviour: Behaviour, root: Path, **server: object) -> tuple[WorkerResult, Decision]:
    """The worker's result and what admission makes of it."""
    with serving(behaviour) as running:
        cell = cell_for(f"http://127.0.0.1:{running.server_port}/v1", **server)
        result = attempt(cell, root)
    return result, decide(cell, result, check)


def test_a_healthy_server_gives_all_three_rates_with_their_definitions(tmp_path: Path) -> None:
    # Few and slow updates: on a loaded machine, too, the four then take turns in their waiting and not in computing.
    result, decision = run(Behaviour(update_s=0.006, words_per_update=4), tmp_path)
    assert (decision.status, decision.reason) == (Status.OK, "")
    assert set(SPEED) == set(decision.metrics)
    for name in SPEED:
        found = decision.metrics[name]
        assert len(found.samples) == 5
        assert found.details["engine"] == "server"
        assert found.details["definition"]
        assert found.details["lossy"] == ["fp8 KV cache"]
    pp, tg, agg = (decision.metrics[name] for name in SPEED)
    # The fake takes at least 19 ms for a prompt of at most 563 words, and 5.4 ms for four words.
    assert 0 < pp.value < 563 / 0.019
    assert 0 < tg.value < 1.1 * 4 / 0.0054
    assert agg.value > tg.value
    assert agg.details["single_stream_tok_s"] == tg.value
    assert agg.details["with_prefill_tok_s"] < agg.value
    assert all(abs(n - 512) <= 51 for n in pp.details["realised_prompt_tokens"])
    assert {name: status for name, (status, _) in decision.gaps.items()} == dict.fromkeys(decision.gaps, Status.UNSUPPORTED)
    assert "running already" in decision.gaps["load_s"][1]
    requests = result.evidence["requests"]
    # 1 to settle, 6 single, 3 for the cache, 24 in waves of four.
    assert (requests["ok"], requests["failed"], requests["cached_tokens_max"]) == (34, 0, 0)
    assert result.evidence["server"]["says"] == {"/version": {"version": "0.0-fake"}}
    assert result.evidence["server"]["route"] == "/completions"
    assert any("was not told a depth" in note for note in result.notes)


def test_no_prompt_begins_like_another_but_for_the_probe(tmp_path: Path) -> None:
    how = Behaviour()
    run(how, tmp_path)
    heads = [prompt.split()[0] for prompt in how.prompts]
    assert len(how.prompts) - len(set(heads)) == 2
    assert all(body["ignore_eos"] and body["min_tokens"] == 128 and body["cache_prompt"] is False for body in how.bodies)


# Words of one letter for the first request, of nine for those that are timed: its ratio of characters misleads.
UNEVEN = "a " * 1024 + "lengthier " * 4000


def test_a_server_with_a_tokenizer_cuts_the_prompts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(UNEVEN)
    _, decision = run(Behaviour(tokenizes=True), tmp_path)
    details = decision.metrics["pp512_tok_s"].details
    assert details["prompts_cut_by"] == "the server's tokenizer"
    assert all(abs(n - 512) <= 3 for n in details["realised_prompt_tokens"])


def test_prompts_that_miss_their_length_are_no_prefill_rate(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(UNEVEN)
    _, decision = run(Behaviour(), tmp_path)
    assert decision.gaps["pp512_tok_s"][0] is Status.IMPLAUSIBLE
    assert "no measurement of 512" in decision.gaps["pp512_tok_s"][1]


def test_a_chat_only_server_without_options_is_asked_its_way(tmp_path: Path) -> None:
    result, decision = run(Behaviour(completions=False, knows_options=False), tmp_path)
    assert decision.status is Status.OK
    assert decision.metrics["tg128_tok_s"].details["route"] == "/chat/completions"
    assert decision.metrics["tg128_tok_s"].details["options"] == []
    assert len(result.evidence["server"]["declined"]) == 3
    assert result.evidence["requests"]["failed"] == 0


def test_a_server_that_takes_no_request_is_not_loaded(tmp_path: Path) -> None:
    result, decision = run(Behaviour(declines=True), tmp_path)
    assert decision.status is Status.LOAD_FAILED
    assert decision.reason.count("no such model") == 4
    assert result.evidence["requests"]["failed"] == 0


def test_a_server_that_breaks_at_the_first_request_says_how(tmp_path: Path) -> None:
    _, decision = run(Behaviour(fail_with_500_at=1), tmp_path)
    assert (decision.status, decision.reason) == (Status.CRASHED, "HTTP 500 from /v1/completions: an expert is missing")


def test_a_cache_that_reports_its_hits_does_not_touch_fresh_prompts(tmp_path: Path) -> None:
    _, decision = run(Behaviour(cache=True, prefill_s=0.06), tmp_path)
    assert decision.status is Status.OK
    probe = decision.metrics["pp512_tok_s"].details["cache_probe"]
    assert probe["warm"]
    assert probe["reported_tokens"] > 400


def test_a_cache_that_hides_its_hits_costs_the_prefill_rate_alone(tmp_path: Path) -> None:
    _, decision = run(Behaviour(cache=True, reports_cache=False, prefill_s=0.06), tmp_path)
    assert decision.status is Status.OK
    assert decision.gaps["pp512_tok_s"][0] is Status.IMPLAUSIBLE
    assert "does not say when" in decision.gaps["pp512_tok_s"][1]
    assert "tg128_tok_s" in decision.metrics


def test_fresh_prompts_from_a_warm_cache_refuse_the_cell(tmp_path: Path) -> None:
    result, decision = run(Behaviour(shared_tokens=480), tmp_path)
    assert result.gaps["pp512_tok_s"][0] is Status.IMPLAUSIBLE
    assert decision.status is Status.IMPLAUSIBLE
    assert "480 tokens" in decision.reason
    assert not decision.metrics


def test_fewer_tokens_than_asked_are_no_decode_rate(tmp_path: Path) -> None:
    _, decision = run(Behaviour(shorter_by=3), tmp_path)
    assert decision.status is Status.OK
    assert set(SPEED) & set(decision.metrics) == {"pp512_tok_s"}
    for name in SPEED[1:]:
        assert decision.gaps[name] == (Status.IMPLAUSIBLE, "125 tokens came back where 128 were asked for")


def test_one_error_500_is_counted_and_refuses_the_cell(tmp_path: Path) -> None:
    result, decision = run(Behaviour(fail_with_500_at=4), tmp_path)
    assert result.status is Status.OK
    assert result.gaps["tg128_tok_s"] == (Status.CRASHED, "HTTP 500 from /v1/completions: an expert is missing")
    assert result.evidence["requests"]["failures"] == [["CRASHED", "HTTP 500 from /v1/completions: an expert is missing"]]
    assert decision.status is Status.CRASHED
    assert "1 of 4 requests failed" in decision.reason
    assert not decision.metrics


@pytest.mark.parametrize(
    ("fault", "reason"),
    [({"stream_error_at": 3}, "kernel launch failed"), ({"cut_at": 3}, "ended before the answer was complete"), ({"no_usage": True}, "usage")],
)
def test_a_stream_that_fails_is_a_failed_request(tmp_path: Path, fault: dict[str, int], reason: str) -> None:
    _, decision = run(Behaviour(**fault), tmp_path)
    assert decision.status is Status.CRASHED
    assert reason in decision.reason
    assert not decision.metrics


def test_a_request_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    result, _ = run(Behaviour(hang_at=3), tmp_path, request_timeout_s=1.0)
    assert result.gaps["tg128_tok_s"][0] is Status.TIMEOUT
    assert "request_timeout_s=1 s" in result.gaps["tg128_tok_s"][1]
    assert result.evidence["requests"]["failed"] == 1


def test_a_server_that_drips_is_a_timeout_too(tmp_path: Path) -> None:
    result, _ = run(Behaviour(update_s=0.05), tmp_path, request_timeout_s=1.0)
    assert (result.status, result.reason) == (Status.TIMEOUT, "no complete answer within path.server.request_timeout_s=1 s")


def test_a_server_that_answers_in_turn_is_no_four_way(tmp_path: Path) -> None:
    _, decision = run(Behaviour(one_at_a_time=True), tmp_path)
    assert decision.gaps["agg4_tg128_tok_s"][0] is Status.UNSUPPORTED
    assert "together" in decision.gaps["agg4_tg128_tok_s"][1]
    assert "tg128_tok_s" in decision.metrics


def test_a_stream_collected_on_its_way_has_no_clock(tmp_path: Path) -> None:
    _, decision = run(Behaviour(words_per_update=64), tmp_path)
    assert decision.gaps["tg128_tok_s"][0] is Status.IMPLAUSIBLE
    assert "128 tokens came in 2 updates" in decision.gaps["tg128_tok_s"][1]


def test_speculation_shows_as_update_gaps_and_not_as_token_latencies(tmp_path: Path) -> None:
    _, decision = run(Behaviour(words_per_update=4), tmp_path)
    details = decision.metrics["tg128_tok_s"].details
    assert details["tokens_per_update"] == 4
    assert "update_gap_ms_p99" in details
    assert not any(key.startswith("itl_ms") for key in details)


def test_another_model_that_answers_is_another_path(tmp_path: Path) -> None:
    _, decision = run(Behaviour(answers_as="small-model"), tmp_path, model="fake-model")
    assert decision.status is Status.PATH_NOT_EXECUTED
    assert "small-model" in decision.reason


def test_nothing_there_names_the_address_and_the_fix(tmp_path: Path) -> None:
    result = attempt(cell_for(f"http://127.0.0.1:{free_port()}/v1"), tmp_path)
    assert result.status is Status.INFRA
    assert "path.server.command" in result.reason
    assert "http://127.0.0.1:" in result.reason


def test_a_path_without_a_server_and_a_wrong_address_are_one_line(tmp_path: Path) -> None:
    cell = cell_for("http://127.0.0.1:1/v1")
    bare = cell.model_copy(update={"path": cell.path.model_copy(update={"server": None})})
    assert "names no server" in attempt(bare, tmp_path).reason
    assert "must be an http address" in attempt(cell_for("ftp://127.0.0.1/v1"), tmp_path).reason


def test_without_httpx_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from pathlib import Path\n"
        "from tests.engines.helpers import attempt, cell_for, free_port\n"
        "print(attempt(cell_for('http://127.0.0.1:1/v1'), Path(sys.argv[1])).reason)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert "pip install 'migration-lab[server]'" in done.stdout
