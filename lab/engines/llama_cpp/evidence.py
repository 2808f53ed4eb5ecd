"""What speaks for and against a number that came through llama.cpp: the file, the depth, the place of every layer, the tokens evaluated.

The counterpart of `lab.evidence` for `engine=llama_cpp`, where operations are not counted. A requested GPU is no evidence: llama.cpp goes on silently with
layers on the CPU. It shows that this file was loaded whole onto the cell's device and that each token went through exactly as often as the protocols need;
which kernel multiplied, and in which precision, is llama.cpp's word.
"""

from __future__ import annotations

from typing import Any

from lab.cell import Cell
from lab.record import Status

Finding = tuple[Status, str]

_REQUIRED = ("llama_cpp", "model", "file", "placement", "tokens")
_GPU = "GPU"


def check(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Findings against the cell, worst first; empty when the evidence holds. `evidence` is that of `lab.engines.llama_cpp.attempt`."""
    if missing := [key for key in _REQUIRED if key not in evidence]:
        return [(Status.PATH_NOT_EXECUTED, f"the worker reported no {', '.join(missing)}: nothing shows that llama.cpp ran this file")]
    findings = [*_file(evidence["file"]), *_model(cell, evidence["model"]), *_tokens(evidence["tokens"]), *_places(cell, evidence)]
    return sorted(findings, key=lambda f: f[0] is not Status.PATH_NOT_EXECUTED)


def _file(file: dict[str, Any]) -> list[Finding]:
    """Whether llama.cpp read the bytes whose digest is the artifact's."""
    if file["loaded"] != file["name"]:
        return [_not_executed(f"llama.cpp says that it loaded {file['loaded'] or 'nothing'}, not {file['name']}")]
    if not file["unchanged"]:
        return [_not_executed(f"{file['name']} changed between its digest {str(file['sha256'])[:12]} and the end of the load: another file was measured")]
    return []


def _model(cell: Cell, model: dict[str, Any]) -> list[Finding]:
    findings = []
    if str(model["architecture"]).replace("_", "") != cell.model.arch.replace("_", ""):
        findings.append(_not_executed(f"llama.cpp ran the architecture {model['architecture']}, the cell is {cell.model.arch}"))
    if model["n_vocab"] != model["vocab_size"]:
        findings.append(_not_executed(f"llama.cpp gave logits of {model['n_vocab']} tokens, the artifact has {model['vocab_size']}"))
    if model["n_layer"] != cell.layers:
        findings.append(_not_executed(f"{model['n_layer']} layers ran, {cell.layers} were asked for"))
    return findings


def _tokens(tokens: dict[str, int]) -> list[Finding]:
    """Whether what was needed, what was fed and what llama.cpp counted are one number."""
    if not tokens["needed"] == tokens["evaluated"] == tokens["llama_cpp"]:
        said = f"{tokens['evaluated']} were fed and llama.cpp counted {tokens['llama_cpp']}"
        return [_not_executed(f"{tokens['needed']} tokens were needed, {said}: another computation took part")]
    return [] if tokens["evaluated"] else [_not_executed("no token went through the model")]


def _places(cell: Cell, evidence: dict[str, Any]) -> list[Finding]:
    """Where each layer, the output layer and each layer's state lie, against the cell's device."""
    place, asked = evidence["placement"], cell.device.torch_device.split(":")[0]
    where = {int(index): str(device) for index, device in place["layers"]}
    if missing := sorted(set(range(cell.layers + 1)) - where.keys()):
        return [_not_executed(f"llama.cpp's log names no device for layer {missing[0]}, of {cell.layers} and the output layer: nothing shows where it ran")]
    gpus = [str(device["name"]) for device in evidence["llama_cpp"]["devices"] if device["type"] == _GPU]
    index = int(cell.device.torch_device.partition(":")[2] or 0)
    right = set(gpus[index : index + 1]) if asked == "cuda" else {"CPU"}
    # Blocks behind the output's index predict further tokens; they are not run.
    wrong = sorted(index for index, device in where.items() if device not in right and index <= cell.layers)
    if wrong:
        named = ", ".join(sorted({where[index] for index in wrong}))
        what = f"{len(wrong)} of {cell.layers + 1} layers (the output layer counted) were on {named}, the cell is on {cell.device.torch_device}"
        return [_not_executed(what) if wrong[: cell.layers] == list(range(cell.layers)) else (Status.DEGRADED, what)]
    if not place["states"]:
        return [_not_executed("llama.cpp's log names no device for any layer's state: nothing shows where it was kept")]
    states = sorted({str(device) for _, device in place["states"]} - right)
    if states:
        return [(Status.DEGRADED, f"the state of {sum(d in states for _, d in place['states'])} layers was on {', '.join(states)}, not with the layers")]
    return []


def _not_executed(reason: str) -> Finding:
    return Status.PATH_NOT_EXECUTED, reason
