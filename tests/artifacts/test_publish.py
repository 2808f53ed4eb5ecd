"""How files get their names: never over another one without force, also when two finish at once; what lies beside them; targets that cannot be."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.artifacts import publish
from lab.artifacts.vqf_beside import planned_beside, published_with
from lab.artifacts.vqf_convert import run
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_relayout import relayout
from lab.errors import LabError
from tests.artifacts.test_vqf_writer import arguments, dense, saved, written
from tests.artifacts.vqf_files import dual, encoded, one_thread, put_beside, q4, random_weights, tokenizer  # noqa: F401


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_of_two_conversions_to_one_name_the_second_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """The first ends while the second is still writing; without links (FAT) the name is taken in another way."""
    if not links:
        monkeypatch.setattr(publish.os, "link", no_links)
    saved(dense(), tmp_path / "hf")
    path = tmp_path / "out" / "m.vqf"

    def meanwhile(*_: Any) -> None:
        if not path.exists():
            written(tmp_path / "hf", path, "q8")

    with pytest.raises(LabError, match=r"m\.vqf exists; choose another name or say --force"):
        written(tmp_path / "hf", path, "q4", progress=meanwhile)
    assert VqfFile(path).sets == ("q8",) and names(path.parent) == ["config.json", "m.vqf", "tokenizer.json"]


def test_a_name_that_was_taken_without_links_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = VqfFile(q4().write(tmp_path / "a.vqf"))
    monkeypatch.setattr(publish.os, "link", no_links)
    monkeypatch.setattr(publish.os, "replace", no_links)
    with pytest.raises(LabError, match=r"b\.vqf: cannot be written \(Operation not permitted\); nothing was left behind"):
        relayout(source, tmp_path / "b.vqf", 0x1)
    assert names(tmp_path) == ["a.vqf"]


def test_small_files_of_another_model_that_came_meanwhile_are_kept(tmp_path: Path) -> None:
    saved(dense(), tmp_path / "hf")
    path = tmp_path / "out" / "m.vqf"

    def meanwhile(*_: Any) -> None:
        path.with_name("tokenizer.json").write_text('{"another": 1}')

    with pytest.raises(LabError, match=r"tokenizer\.json exists"):
        written(tmp_path / "hf", path, "q4", progress=meanwhile)
    assert names(path.parent) == ["tokenizer.json"] and path.with_name("tokenizer.json").read_text() == '{"another": 1}'


def test_a_disk_that_fills_with_the_small_files_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(dense(), tmp_path / "hf")
    real = os.fdopen

    def full(handle: int, *more: Any) -> Any:
        if len(names(tmp_path / "out")) == 3:  # the large file and two small ones, all under other names
            os.close(handle)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, *more)

    monkeypatch.setattr("lab.artifacts.vqf_beside.os.fdopen", full)
    with pytest.raises(LabError, match="No space left on device"):
        written(tmp_path / "hf", tmp_path / "out" / "m.vqf")
    assert names(tmp_path) == ["hf"]


def test_a_leftover_of_the_same_process_number_is_in_nobodys_way(tmp_path: Path) -> None:
    source = VqfFile(q4().write(tmp_path / "a.vqf"))
    (tmp_path / f".b.vqf.{os.getpid()}.partial").write_bytes(b"old")
    relayout(source, tmp_path / "b.vqf", 0x1)
    assert VqfFile(tmp_path / "b.vqf").check_sum() and len(names(tmp_path)) == 3


def test_targets_that_cannot_be_are_refused_before_the_source_is_read(tmp_path: Path) -> None:
    content = bytearray(q4().content())
    content[-100] ^= 1  # whoever reads it all finds the wrong checksum first
    (tmp_path / "a.vqf").write_bytes(content)
    put_beside(tmp_path)
    for name in ("folder.vqf", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "taken.vqf").write_bytes(b"old")
    (tmp_path / "other" / "tokenizer.json").write_text("[]")
    os.mkfifo(tmp_path / "pipe.vqf")
    for target, message in (
        ("folder.vqf", r"folder\.vqf is a folder; name a file in it"),
        ("pipe.vqf", r"pipe\.vqf is no regular file; --force does not replace it"),
        ("taken.vqf/x.vqf", r"x\.vqf: .*/taken\.vqf is no folder; choose another name"),
        ("taken.vqf/deep/x.vqf", r"x\.vqf: .*/taken\.vqf is no folder; choose another name"),
        ("x.VQF", r"x\.VQF: name the file with \.vqf in small letters"),
        (".vqf", r"\.vqf: name the file with"),
        ("x.gguf", r"x\.gguf: name the file with \.vqf"),
    ):
        for words in ({"force": True}, {"force": True, "wmode": "q8"}):
            with pytest.raises(LabError, match=message):
                run(tmp_path / "a.vqf", tmp_path / target, arguments(**words))
    for words in ({}, {"wmode": "q8"}):
        with pytest.raises(LabError, match=r"taken\.vqf exists; choose another name or say --force"):
            run(tmp_path / "a.vqf", tmp_path / "taken.vqf", arguments(**words))
        with pytest.raises(LabError, match=r"other/tokenizer\.json exists and says something else; choose another folder or say --force"):
            run(tmp_path / "a.vqf", tmp_path / "other", arguments(**words))
        with pytest.raises(LabError, match="checksum"):
            run(tmp_path / "a.vqf", tmp_path / "fine.vqf", arguments(**words))
    assert names(tmp_path) == ["a.vqf", "folder.vqf", "other", "pipe.vqf", "taken.vqf", "tokenizer.json"]


@pytest.mark.parametrize("words", [{}, {"wmode": "q4"}])
def test_a_damaged_file_is_said_to_be_damaged_and_not_to_have_wrong_flags(tmp_path: Path, words: dict[str, Any]) -> None:
    content = bytearray(dual().content())
    place = VqfFile(dual().write(tmp_path / "a.vqf")).entry("q8_q")
    content[place.offset : place.offset + place.nbytes] = encoded(random_weights()["q"], "Q8_0")  # looks like rows
    (tmp_path / "a.vqf").write_bytes(content)
    put_beside(tmp_path)
    with pytest.raises(LabError, match="checksum"):
        run(tmp_path / "a.vqf", tmp_path / "b.vqf", arguments(**words))


def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.vqf")
    with pytest.raises(LabError, match=r"m\.vqf: cannot be read \(no regular file\)"):
        VqfFile(tmp_path / "m.vqf")


CONFIG = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 9}
CONFIG |= {"intermediate_size": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-6}  # type: ignore[dict-item]


def test_the_same_said_otherwise_is_no_other_content(tmp_path: Path) -> None:
    path, kept = tmp_path / "m.vqf", tmp_path / "config.json"
    for text in (CONFIG, {**CONFIG, "more": 1}, {"model_type": "qwen3_vl", "text_config": CONFIG}, {**CONFIG, "rope_parameters": {"rope_theta": 1000000}}):
        kept.write_text(json.dumps(text))
        assert planned_beside(path, CONFIG, None) == {}
    deep = "[" * 100_000
    for text in ({**CONFIG, "rope_theta": 1e4}, {**CONFIG, "intermediate_size": 32}, {**CONFIG, "rms_norm_eps": "1e-6"}, {**CONFIG, "vocab_size": None}):
        kept.write_text(json.dumps(text))
        assert list(planned_beside(path, CONFIG, None, force=True)) == [kept]
    for raw in (deep.encode(), b"\xff\xfe", b"9" * 5000, b"[]"):
        kept.write_bytes(raw)
        with pytest.raises(LabError, match=r"config\.json exists and says something else; choose another folder or say --force"):
            planned_beside(path, CONFIG, None)
    kept.unlink()
    os.mkfifo(kept)
    with pytest.raises(LabError, match=r"config\.json is no regular file"):
        planned_beside(path, CONFIG, None, force=True)


@pytest.mark.parametrize("other", ["other.vqf", "model.safetensors"])
def test_what_belongs_to_another_model_file_is_not_replaced_by_force_either(tmp_path: Path, other: str) -> None:
    (tmp_path / "new").mkdir()
    dual().write(tmp_path / "a.vqf")
    put_beside(tmp_path)
    (tmp_path / "new" / "tokenizer.json").write_text("[]")
    (tmp_path / "new" / other).write_bytes(b"")
    with pytest.raises(LabError, match=rf"tokenizer\.json exists and says something else; it belongs to {other}, which lies there too"):
        relayout(VqfFile(tmp_path / "a.vqf"), tmp_path / "new" / "m.vqf", 0x1, force=True)
    assert names(tmp_path / "new") == sorted([other, "tokenizer.json"]) and (tmp_path / "new" / "tokenizer.json").read_text() == "[]"
    (tmp_path / "new" / other).unlink()
    relayout(VqfFile(tmp_path / "a.vqf"), tmp_path / "new" / "m.vqf", 0x1, force=True)
    assert (tmp_path / "new" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_a_file_goes_into_its_own_models_folder_and_over_itself(tmp_path: Path) -> None:
    """The source's own small files may be spaced otherwise than the lab writes them."""
    saved(dense(), tmp_path / "hf")
    text = json.dumps({key: value for key, value in json.loads(tokenizer(103).to_str()).items() if key not in ("truncation", "padding")})
    (tmp_path / "hf" / "tokenizer.json").write_text(text)
    path = tmp_path / "hf" / "model.vqf"
    run(tmp_path / "hf", path, arguments(wmode="q8"))
    run(path, path, arguments(layout="0x2", force=True))
    run(path, path, arguments(wmode="q4", q8_layout="rows", force=True))
    assert VqfFile(path).sets == ("q4",) and (tmp_path / "hf" / "tokenizer.json").read_text() == text


@pytest.mark.parametrize("existed", [True, False])
def test_where_force_fails_half_way_what_was_there_is_there_again(existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config, aside = tmp_path / "m.vqf", tmp_path / "config.json", tmp_path / ".aside"
    config.write_text("old config")
    if existed:
        path.write_text("old model")
    aside.write_text("new model")
    real, calls = os.replace, []

    def full(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(publish.os, "replace", full)
    with pytest.raises(OSError, match="No space left"), published_with(aside, path, {config: "new config"}, force=True):
        pytest.fail("the block must not begin")
    assert config.read_text() == "old config"
    assert names(tmp_path) == (["config.json", "m.vqf"] if existed else ["config.json"])
    assert not existed or path.read_text() == "old model"


def test_force_replaces_both_and_leaves_nothing_else(tmp_path: Path) -> None:
    path, config, aside = tmp_path / "m.vqf", tmp_path / "config.json", tmp_path / ".aside"
    for file in (path, config):
        file.write_text("old")
    aside.write_text("new model")
    with published_with(aside, path, {config: "new config"}, force=True):
        assert (path.read_text(), config.read_text()) == ("new model", "new config")
    assert names(tmp_path) == ["config.json", "m.vqf"]
