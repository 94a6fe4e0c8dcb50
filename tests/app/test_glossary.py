"""The glossary: whole in both languages, its places in our code exist, formulas are well formed, marks are known."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.api_lessons import create_lessons_router
from app.compare_table import TERMS as COMPARE_TERMS
from app.context import AppContext
from app.glossary import (
    MARK,
    bare,
    formula_html,
    formula_nodes,
    glossary_html,
    glossary_payload,
    glossary_texts,
    marked,
    term_html,
    term_ids,
)
from app.lessons import lesson_texts, lessons_payload
from app.result_table import TERMS as RESULT_TERMS
from app.texts import LANGUAGES, text
from presets.glossary import GlossaryError, Term, load_terms

ROOT = Path(__file__).resolve().parents[2]
WANTED = {
    *("kv_cache", "window", "sink", "local", "full", "quant", "evicted", "routing", "promotion", "demotion", "score"),
    *("fmm", "fmm_fp", "mass_share", "churn", "lir", "ttr", "qsa", "rq", "budget", "share", "quant_share"),
    *("scale_zero", "metadata", "teacher_forcing", "kl", "agreement", "regret", "oracle", "ttft", "tpot"),
    *("persistent", "workspace"),
}


def _defined(path: Path, name: str) -> bool:
    """Whether a file defines a function, class or method of that dotted name."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        inner = [child for child in getattr(node, "body", []) if getattr(child, "name", None) == part]
        if not inner:
            return False
        node = inner[0]
    return True


def test_every_term_is_there_in_both_languages() -> None:
    assert term_ids() >= WANTED
    for lang in LANGUAGES:
        known = {key.split(".")[0] for key in glossary_texts(lang)} - {"ui"}
        assert known == term_ids()
        for term in term_ids():
            assert glossary_texts(lang)[f"{term}.name"]
            sentences = len(re.findall(r"[.。](?:\s|$)|。", glossary_texts(lang)[f"{term}.say"]))
            assert 1 <= sentences <= 3, (lang, term)
    assert set(glossary_texts("en")) == set(glossary_texts("zh"))
    assert len({glossary_texts("en")[f"{term}.name"] for term in term_ids()}) == len(term_ids())


@pytest.mark.parametrize("term", load_terms(), ids=lambda term: term.id)
def test_what_computes_a_term_exists(term: Term) -> None:
    path = ROOT / term.file
    assert path.is_file() and path.is_relative_to(ROOT / "engine")
    assert _defined(path, term.code), f"{term.file} defines no {term.code}"


def test_a_name_that_is_gone_would_be_noticed() -> None:
    assert _defined(ROOT / "engine/budget.py", "window_costs")
    assert not _defined(ROOT / "engine/budget.py", "window_cost")
    assert not _defined(ROOT / "engine/budget.py", "KVShape.nothing")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_formulas_and_the_list_are_well_formed(lang: str) -> None:
    for term in load_terms():
        html = formula_html(formula_nodes(term.formula))
        ElementTree.fromstring(f"<p>{html}</p>")
        assert not set(html) & set("_{}^[]"), term.id
    root = ElementTree.fromstring(glossary_html(lang))
    assert len(list(root.iter("dt"))) == len(term_ids())
    words = "".join(root.itertext())
    for term in load_terms():
        assert f"{term.file}: {term.code}" in words
        assert glossary_texts(lang)[f"{term.id}.say"] in words


def test_signs_of_a_formula() -> None:
    assert formula_nodes("a_{K_f}") == [["", "a"], ["sub", [["", "K"], ["sub", [["", "f"]]]]]]
    assert formula_html(formula_nodes("x^{2} < [a_{i} // b]")) == (
        'x<sup>2</sup> &lt; <span class="qe-frac"><span>a<sub>i</sub></span><i> / </i><span>b</span></span>'
    )


def test_a_window_costs_what_its_formula_says() -> None:
    """The formula of the INT2 tier, with the shape of the embedded model, against the plan of the engine."""
    from engine.budget import KVShape, window_costs
    from engine.config import QEvictConfig

    config = QEvictConfig()
    shape = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, element_bytes=2)
    costs = window_costs(config, shape)
    heads, omega, dim, bits = 3, config.window_size, 64, config.bits
    assert costs.quant == 2 * heads * omega * dim * bits // 8 + 4 * heads * (dim + omega) + 8
    assert costs.quant_metadata == 4 * heads * (dim + omega) + 8
    assert costs.full == 2 * heads * omega * dim * 2 + 8


# marks


def test_marked_words_name_known_terms_and_the_same_in_both_languages() -> None:
    english, chinese = lesson_texts("en"), lesson_texts("zh")
    used = set()
    for key, words in english.items():
        terms = sorted(found[2] for found in MARK.finditer(words))
        assert set(terms) <= term_ids(), key
        assert terms == sorted(found[2] for found in MARK.finditer(chinese[key])), key
        used |= set(terms)
    assert len(used) >= 20
    assert {*RESULT_TERMS.values(), *COMPARE_TERMS.values()} <= term_ids()


def test_terms_of_the_board_are_known() -> None:
    scripts = "".join((ROOT / "assets/js" / name).read_text("utf-8") for name in ("tier_build.js", "tier_panel.js"))
    named = set(re.findall(r'"data-term": "([a-z_]+)"', scripts))
    assert {"budget", "persistent", "routing"} <= named <= term_ids()
    assert {"sink", "local", "full", "quant", "evicted", "fmm", "churn", "metadata", "shadow"} <= term_ids()


def test_parts_and_bare_words_agree() -> None:
    words = "The [best](full) of {n}, [again](quant)"
    assert marked(words) == [("The ", ""), ("best", "full"), (" of {n}, ", ""), ("again", "quant")]
    assert bare(words) == "The best of {n}, again"
    for lang in LANGUAGES:
        for lesson in lessons_payload(lang)["lessons"]:
            for step in lesson["steps"]:
                assert "".join(part for part, _ in step["told"]) == step["say"]
                assert "](" not in json.dumps(step, ensure_ascii=False)


def test_tokens_never_make_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    from app import lessons
    from app.lesson_facts import Fact

    monkeypatch.setattr(lessons, "lesson_texts", lambda lang: {"x.y": "[{words}](full) and {words}"})
    told = lessons.told("en", "x.y", {"words": Fact("[a](quant)", "text")})
    assert told == [["[a](quant)", "full"], [" and [a](quant)", ""]]


def test_a_button_is_escaped() -> None:
    assert term_html("fmm", "<b>") == '<button type="button" class="qe-term" data-term="fmm">&lt;b&gt;</button>'
    assert term_html("", "a & b") == "a &amp; b"
    assert term_html("nothing", "x") == "x"


def test_every_figure_of_a_result_that_has_a_term_is_named() -> None:
    for lang in LANGUAGES:
        assert all(text(lang, f"result.{name}") != f"result.{name}" for name in RESULT_TERMS)


# the file and the route


@pytest.mark.parametrize(
    ("body", "rule"),
    [("[a]\nformula = 'x'", "must have"), ("a = 1", "must have"), ("[a", "readable TOML")],
)
def test_a_bad_file_is_refused(tmp_path: Path, body: str, rule: str) -> None:
    (tmp_path / "glossary.toml").write_text(body, encoding="utf-8")
    with pytest.raises(GlossaryError, match=rule):
        load_terms(tmp_path / "glossary.toml")


def test_the_routes() -> None:
    app = FastAPI()
    context: AppContext | None = None
    app.include_router(create_lessons_router(context))  # type: ignore[arg-type]
    with TestClient(app) as client:
        answer = client.get("/qe/glossary?lang=zh-CN")
        assert answer.status_code == 200
        assert answer.json() == json.loads(json.dumps(glossary_payload("zh")))
        code = client.get("/qe/qr", params={"link": "http://10.0.0.2:7860/?class=ab12cd"})
        assert code.headers["content-type"] == "image/svg+xml"
        ElementTree.fromstring(code.content)
        for link in ("javascript:alert(1)", "http://a b", "x"):
            assert client.get("/qe/qr", params={"link": link}).status_code == 422
        assert client.get("/qe/qr", params={"link": "http://" + "a" * 400}).status_code == 422
