"""The check of llama.cpp's evidence, its log's reader and the bytes a step must read, one field at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from lab.artifacts.gguf import open_gguf
from lab.engines.llama_cpp.evidence import check
from lab.engines.llama_cpp.log import Log, placement
from lab.engines.llama_cpp.speed import step_bytes
from lab.record import Status
from tests.artifacts.gguf_models import EXPERTS, EXPERTS_USED, HIDDEN, LAYERS, VOCAB, WIDTH, hf_model, model_of
from tests.engines.fake_llama_cpp import DEBUG, ERROR, INFO, WARN, FakeLlama
from tests.engines.llama_helpers import cell_for

CPU, GPU, OTHER = ({"name": name, "description": "", "type": kind} for name, kind in (("CPU", "CPU"), ("CUDA0", "GPU"), ("CUDA1", "GPU")))
GOOD: dict[str, Any] = {
    "llama_cpp": {"devices": [CPU, GPU, OTHER]},
    "model": {"architecture": "llama", "n_layer": 3, "n_vocab": 263, "vocab_size": 263},
    "file": {"name": "m.gguf", "loaded": "m.gguf", "sha256": "ab", "bytes": 9, "unchanged": True},
    "placement": {"layers": [[i, "CPU"] for i in range(4)], "states": [[i, "CPU"] for i in range(3)]},
    "tokens": {"needed": 7, "evaluated": 7, "llama_cpp": 7},
}


def evidence(layers: list[str] | None = None, states: list[str] | None = None, **changes: dict[str, Any]) -> dict[str, Any]:
    """GOOD with other places, or other values of a field."""
    found = copy.deepcopy(GOOD)
    for key, value in changes.items():
        found[key] |= value
    found["placement"] |= {key: list(enumerate(value)) for key, value in (("layers", layers), ("states", states)) if value is not None}
    return found


def test_sound_evidence_has_no_finding() -> None:
    assert check(cell_for(), evidence()) == []
    assert check(cell_for("cuda:1"), evidence(["CUDA1"] * 4, ["CUDA1"] * 3)) == []


@pytest.mark.parametrize("key", sorted(GOOD))
def test_nothing_reported_is_nothing_run(key: str) -> None:
    found = evidence()
    del found[key]
    assert check(cell_for(), found) == [(Status.PATH_NOT_EXECUTED, f"the worker reported no {key}: nothing shows that llama.cpp ran this file")]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({"needed": 8}, "8 tokens were needed, 7 were fed"),
        ({"evaluated": 6}, "6 were fed and llama.cpp counted 7"),
        ({"llama_cpp": 9}, "llama.cpp counted 9"),
        ({"needed": 0, "evaluated": 0, "llama_cpp": 0}, "no token"),
    ],
)
def test_token_counts_must_be_one_number(tokens: dict[str, int], said: str) -> None:
    ((status, reason),) = check(cell_for(), evidence(tokens=tokens))
    assert status is Status.PATH_NOT_EXECUTED
    assert said in reason


@pytest.mark.parametrize(
    ("layers", "states", "status", "said"),
    [
        (["CPU"] * 4, ["CPU"] * 3, Status.PATH_NOT_EXECUTED, "4 of 4 layers"),
        (["CPU"] * 3 + ["CUDA0"], ["CPU"] * 3, Status.PATH_NOT_EXECUTED, "3 of 4 layers"),
        (["CUDA0"] * 3 + ["CPU"], ["CUDA0"] * 3, Status.DEGRADED, "1 of 4 layers (the output layer counted) were on CPU"),
        (["CPU"] + ["CUDA0"] * 3, ["CUDA0"] * 3, Status.DEGRADED, "1 of 4 layers"),
        (["CUDA0"] * 4, ["CUDA0", "CPU", "CUDA0"], Status.DEGRADED, "the state of 1 layers was on CPU"),
        (["CUDA0", "CUDA0", "CUDA1", "CUDA1"], ["CUDA0"] * 3, Status.DEGRADED, "2 of 4 layers (the output layer counted) were on CUDA1"),
        (["CUDA0"] * 3, ["CUDA0"] * 3, Status.PATH_NOT_EXECUTED, "no device for layer 3"),
    ],
)
def test_places_of_a_gpu_cell(layers: list[str], states: list[str], status: Status, said: str) -> None:
    ((found, reason), *_) = check(cell_for("cuda"), evidence(layers, states))
    assert found is status
    assert said in reason


def test_the_worst_finding_comes_first() -> None:
    found = check(cell_for("cuda"), evidence(["CPU"] + ["CUDA0"] * 3, ["CUDA0"] * 3, model={"n_layer": 2}))
    assert [status for status, _ in found] == [Status.PATH_NOT_EXECUTED, Status.DEGRADED]


def test_names_of_architectures_differ_in_underscores_only() -> None:
    assert check(cell_for(arch="qwen3_moe"), evidence(model={"architecture": "qwen3moe"})) == []
    assert check(cell_for(arch="qwen3"), evidence(model={"architecture": "qwen3moe"})) != []


def test_the_log_is_read_over_pieces_and_only_what_matters_is_kept() -> None:
    fake = FakeLlama()
    log = Log(fake)
    fake.say(INFO, "llama_model_loader: loaded meta data with 33 key-value pairs and 272 tensors from a (b)/m.gguf (version GGUF V3 (latest))\n")
    fake.say(DEBUG, "load_tensors: layer   0 assig", "ned to device CUDA0, is_swa = 1\nload_tensors: layer  11 assigned to device CPU, is_swa = 0\n")
    fake.say(INFO, "load_tensors:   CPU_Mapped model buffer size =    92.10 MiB\nload_tensors:        CUDA0 model buffer size =     1.00 MiB\n")
    fake.say(INFO, "load_tensors:        CUDA0 model buffer size =     0.50 MiB\nload_tensors: offloaded 3/12 layers to GPU\n")
    fake.say(INFO, ".", ".", "\n")
    fake.say(WARN, "llama_context: n_ctx_seq (9000) > n_ctx_train (8192)", " -- possible overflow\n")
    fake.say(DEBUG, "llama_memory_recurrent: layer   2: dev = CUDA0\n")
    fake.say(INFO, "llama_memory_recurrent:      CUDA0 RS buffer size =     2.25 MiB\n")
    assert placement(log.lines) == {
        "file": "a (b)/m.gguf",
        "layers": [[0, "CUDA0"], [11, "CPU"]],
        "states": [[2, "CUDA0"]],
        "buffers_mib": {"CPU_Mapped": {"model": 92.1}, "CUDA0": {"model": 1.5, "RS": 2.25}},
        "offloaded": [3, 12],
        "flash_attention": None,
    }
    assert log.problems == ["llama_context: n_ctx_seq (9000) > n_ctx_train (8192) -- possible overflow"]
    fake.say(ERROR, "gguf_init: bad ", "magic\n")
    assert log.last_problem() == "gguf_init: bad magic"
    assert len(log.lines) == 9


def _bytes(root: Path, arch: str, tied: bool = False, kind: Kind = Kind.F32, lies: dict[str, Any] | None = None) -> tuple[int | None, int]:
    """(what a step must read, all tensors) of a model."""
    model = model_of(hf_model(arch, tied), arch)
    model.kind_of, model.lies = (lambda name: kind), lies or {}
    gguf = open_gguf(model.write(root / "m.gguf"))
    return step_bytes(gguf, LAYERS), sum(tensor.nbytes for tensor in gguf.tensors.values())


def test_a_step_reads_all_but_the_embedding_that_is_not_the_head(tmp_path: Path) -> None:
    found, whole = _bytes(tmp_path, "qwen3")
    assert found == whole - 4 * VOCAB * HIDDEN
    found, whole = _bytes(tmp_path, "qwen3", tied=True)
    assert found == whole
    found, whole = _bytes(tmp_path, "llama", kind=Kind.F16)
    assert found == whole - 2 * VOCAB * HIDDEN


def test_a_step_reads_the_experts_of_one_token(tmp_path: Path) -> None:
    found, whole = _bytes(tmp_path, "qwen3moe")
    experts = 4 * LAYERS * 3 * EXPERTS * WIDTH * HIDDEN
    assert found == whole - 4 * VOCAB * HIDDEN - experts + experts * EXPERTS_USED // EXPERTS
    assert _bytes(tmp_path, "qwen3moe", lies={"qwen3moe.expert_used_count": None})[0] is None


def test_a_block_behind_the_last_layer_is_not_read(tmp_path: Path) -> None:
    whole = step_bytes(open_gguf(model_of(hf_model("llama"), "llama").write(tmp_path / "m.gguf")), LAYERS)
    fewer = step_bytes(open_gguf(tmp_path / "m.gguf"), LAYERS - 1)
    assert whole is not None
    assert fewer is not None
    heads = HIDDEN * 96 * 2 + HIDDEN * 32 * 2
    assert whole - fewer == 4 * (heads + 3 * WIDTH * HIDDEN + 2 * HIDDEN)
