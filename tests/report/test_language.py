"""The two catalogues say the same things with the same fields, and no sentence is left in a template."""

from __future__ import annotations

import ast
import re
from string import Formatter

import pytest
import yaml

from lab.errors import LabError
from lab.metrics import METRICS
from lab.record import Status
from lab.registered import QUANTITIES
from lab.report.build import TEMPLATES
from lab.report.gaps import RULES
from lab.report.language import FOLDER, load_language
from lab.report.recorded import FILE
from tests.report.support import EN, EXPERIMENTS, ZH

NAMES = ("metrics.", "quantities.")
"""English names of these are in `lab.metrics` and `lab.registered`; only other languages have them in the catalogue."""


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def test_both_catalogues_have_the_same_keys_and_fields() -> None:
    assert [key for key in ZH.texts if not key.startswith(NAMES)] == list(EN.texts)
    for key, text in EN.texts.items():
        assert fields(text) == fields(ZH.texts[key]), key


def test_every_metric_quantity_status_and_rule_has_a_name_in_both() -> None:
    assert {key.removeprefix("metrics.") for key in ZH.texts if key.startswith("metrics.")} == set(METRICS)
    assert {key.removeprefix("quantities.") for key in ZH.texts if key.startswith("quantities.")} == set(QUANTITIES)
    for lang in (EN, ZH):
        sentences = [lang.gloss(status) for status in Status] + [lang(f"rule.{rule}") for rule in RULES]
        assert len(set(sentences)) == len(sentences) and all(lang(f"rule_name.{rule}") for rule in RULES)


def test_the_chinese_catalogue_is_chinese_throughout() -> None:
    """Fixed text without a Chinese letter would be English left behind; fields, names and signs alone are fine."""
    kept = {"html_lang", "unit.tokens"}
    for key, text in ZH.texts.items():
        words = re.sub(r"\{\w+\}|`[^`]*`|\b(TG|PP|PPL|KLD|OK)\b|tok/s", "", text)
        assert key in kept or not re.search(r"[A-Za-z]{2,}", words) or re.search(r"[一-鿿]", words), f"{key}: {text}"
    assert not re.search(r"[一-鿿][,:;?()]|[,:;?()][一-鿿]", "\n".join(ZH.texts.values())), "Chinese text takes full-width punctuation"


def test_no_sentence_is_left_in_a_template() -> None:
    for file in TEMPLATES.glob("*.md.j2"):
        fixed = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"[A-Za-z一-鿿]", fixed), f"{file.name}: {re.findall(r'[A-Za-z一-鿿].*', fixed)}"


def test_every_text_is_used_and_every_used_text_exists() -> None:
    """A key is used literally, or as the end of one put together from a status, a verdict and the like."""
    sources = [*FOLDER.parent.glob("*.py"), *TEMPLATES.glob("*.j2")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    literal = set(re.findall(r"[\"']([a-z_]+(?:\.[a-z_]+)+)[\"']", source)) | set(re.findall(r"(?:lang|self|t)\([\"']([a-z_]+)[\"']", source))
    made = tuple(set(re.findall(r"[\"']([a-z_]+\.)[\"'{]", source)))
    unused = [key for key in EN.texts if key not in literal and not key.startswith(made)]
    assert unused == []
    called = set(re.findall(r"(?:\blang|\bt)\(\s*\"([a-z_.]+[a-z_])\"", source))
    assert called - set(EN.texts) == set()


def test_a_missing_text_or_field_is_an_error() -> None:
    with pytest.raises(KeyError):
        EN("no.such_text")
    with pytest.raises(KeyError):
        EN("depth")


def test_an_unknown_language_is_one_line() -> None:
    with pytest.raises(LabError, match=r"^lang=fr: no such report language; choose lang=en or lang=zh$"):
        load_language("fr")


def test_recorded_reasons_stay_as_recorded_and_the_labs_own_are_translated() -> None:
    assert ZH.reason("never attempted", {}) == "从未尝试"
    assert ZH.reason("exit code 9: killed", {}) == "exit code 9: killed"
    assert ZH.reason("a; b; c", {"a; b": "甲", "c": "乙"}) == "甲; 乙"


def lab_strings() -> str:
    """The text of every string in the lab's code, fields of f-strings as a mark, with implicit joins made."""
    found = []
    for file in FOLDER.parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_what_is_told_of_records_in_chinese_is_what_the_lab_writes() -> None:
    """Every fixed piece of a pattern stands in a string of the code or in a registered experiment; every translation is Chinese, with the pattern's fields."""
    strings = lab_strings() + "\n".join(file.read_text(encoding="utf-8") for file in sorted(EXPERIMENTS.glob("*.yaml")))
    for entry in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        for fixed, _, _, _ in Formatter().parse(entry["en"]):
            for piece in re.split(r"; (?=at the least)|(?<=experts)(?=, and)", fixed):
                words = piece.strip(" ,.;")
                assert words in strings or words.replace(" ", "_") in strings, f"no code writes {piece!r}"
        assert fields(entry["en"]) == fields(entry["zh"])
        assert re.search(r"[一-鿿]", entry["zh"]) and not re.search(r"[一-鿿][,:;?()]|[,:;?()][一-鿿]", entry["zh"]), entry["zh"]


@pytest.mark.parametrize("name", sorted(file.stem for file in EXPERIMENTS.glob("*.yaml")))
def test_the_reasons_of_what_a_registered_experiment_does_not_ask_for_are_told_in_chinese(name: str) -> None:
    data = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8"))
    for reason in {entry["reason"] for entry in data.get("not_owed", [])}:
        assert not re.search(r"[a-z]{3,} [a-z]{2,} [a-z]{2,}", ZH.reason(f"not applicable: {reason}", {})), reason


def test_a_recorded_sentence_of_the_labs_own_is_translated_with_its_parts_and_anything_else_is_left() -> None:
    told = ZH.recorded("bytes read over bandwidth at 576 tokens of context, prefill of 512 tokens also operations over rate; no figures of this device")
    assert told == "576 token 上下文时读取字节除以带宽，512 token 的预填充另计运算量除以算力；没有该设备的数据"
    assert ZH.reason("not applicable: the stage does not ask for it", {}) == "不适用：the stage does not ask for it"
    for free in ("exit code 9: killed", "decoder", "over passages, roughly"):
        assert ZH.recorded(free) == free
    assert EN.recorded("over passages") == "over passages"


def test_units_and_fields_that_are_words_are_told_in_the_language() -> None:
    assert (EN.unit("tokens"), ZH.unit("tokens"), ZH.unit("slots"), ZH.unit("tok/s")) == ("tokens", "token", "槽位", "tok/s")
    assert (EN.field("code"), ZH.field("code"), ZH.field("machine_state.load")) == ("code", "代码", "machine_state.load")
