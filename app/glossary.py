"""The glossary: terms with their words, formula and the place in our code; terms marked in texts; the list as HTML.

A term's words differ by language; formula and place do not. Knows the files that hold them; knows no route.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from html import escape
from typing import Any

from app.settings import ASSETS
from app.texts import language, read_texts
from presets.glossary import load_terms

MARK = re.compile(r"\[([^\[\]]+)\]\(([a-z_]+)\)")
"""A marked term in a text: [words](term)."""
_PART = r"((?:[^\[\]{}]|[_^]\{[^{}]*\})*?)"
_SIGN = re.compile(rf"_\{{([^{{}}]*)\}}|\^\{{([^{{}}]*)\}}|\[{_PART} // {_PART}\]")
_LOW = re.compile(r"_([A-Za-z0-9])")

Node = list[Any]
"""["", text], ["sub", nodes], ["sup", nodes], or ["frac", nodes, nodes]."""


@cache
def glossary_texts(lang: str) -> Mapping[str, str]:
    """All words of the glossary in one language, by flat key such as "fmm.say"."""
    return read_texts(ASSETS / "texts" / f"glossary-{language(lang)}.toml")


@cache
def glossary_payload(lang: str) -> dict[str, Any]:
    """The whole glossary in one language, ready for JSON: the words of the popover, and the terms by id."""
    words = glossary_texts(lang)
    ui = {key.removeprefix("ui."): value for key, value in words.items() if key.startswith("ui.")}
    terms = {
        term.id: {
            "name": words[f"{term.id}.name"],
            "say": words[f"{term.id}.say"],
            "formula": formula_nodes(term.formula),
            "where": f"{term.file}: {term.code}",
        }
        for term in load_terms()
    }
    return {"lang": language(lang), "ui": ui, "terms": terms}


def formula_nodes(formula: str) -> list[Node]:
    """A formula as nested nodes, so that nobody has to read markup in a page."""
    out: list[Node] = []
    at = 0
    for found in _SIGN.finditer(formula):
        _text(formula[at : found.start()], out)
        below, above, upper, lower = found.groups()
        if below is not None:
            out.append(["sub", _low(below)])
        elif above is not None:
            out.append(["sup", formula_nodes(above)])
        else:
            out.append(["frac", formula_nodes(upper), formula_nodes(lower)])
        at = found.end()
    _text(formula[at:], out)
    return out


def _text(text: str, out: list[Node]) -> None:
    if text:
        out.append(["", text])


def _low(text: str) -> list[Node]:
    """What stands below may have a letter below in turn: K_f."""
    out: list[Node] = []
    at = 0
    for found in _LOW.finditer(text):
        _text(text[at : found.start()], out)
        out.append(["sub", [["", found[1]]]])
        at = found.end()
    _text(text[at:], out)
    return out


def formula_html(nodes: list[Node]) -> str:
    """The nodes as HTML; a fraction reads "a / b" where there are no styles."""
    out = []
    for kind, *parts in nodes:
        if kind == "":
            out.append(escape(parts[0]))
        elif kind == "frac":
            upper, lower = (formula_html(part) for part in parts)
            out.append(f'<span class="qe-frac"><span>{upper}</span><i> / </i><span>{lower}</span></span>')
        else:
            out.append(f"<{kind}>{formula_html(parts[0])}</{kind}>")
    return "".join(out)


def term_html(term: str, words: str) -> str:
    """A button that opens a term's popover; the bare words where there is no such term."""
    if term not in term_ids():
        return escape(words)
    return f'<button type="button" class="qe-term" data-term="{escape(term)}">{escape(words)}</button>'


@cache
def term_ids() -> frozenset[str]:
    """The ids of all terms."""
    return frozenset(term.id for term in load_terms())


def marked(text: str) -> list[tuple[str, str]]:
    """A text in parts: (words, term), with "" as the term of words that are not marked."""
    parts = []
    at = 0
    for found in MARK.finditer(text):
        parts.append((text[at : found.start()], ""))
        parts.append((found[1], found[2]))
        at = found.end()
    parts.append((text[at:], ""))
    return [part for part in parts if part[0]]


def bare(text: str) -> str:
    """A text without its marks."""
    return MARK.sub(lambda found: found[1], text)


def glossary_html(lang: str) -> str:
    """The whole glossary as one list to read; every word is escaped."""
    glossary = glossary_payload(lang)
    ui = glossary["ui"]
    items = "".join(
        f'<div class="qe-gloss" id="qe-term-{escape(name)}"><dt>{escape(term["name"])}</dt>'
        f'<dd><p>{escape(term["say"])}</p><p class="qe-formula" dir="ltr">{formula_html(term["formula"])}</p>'
        f"<p>{escape(ui['where'])} <code>{escape(term['where'])}</code></p></dd></div>"
        for name, term in glossary["terms"].items()
    )
    symbols = formula_html(formula_nodes(ui["symbols"]))
    return (
        f'<section class="qe-glossary" id="qe-glossary"><h3 tabindex="-1">{escape(ui["title"])}</h3>'
        f"<p>{escape(ui['intro'])}</p><dl>{items}</dl>"
        f"<h3>{escape(ui['symbols_title'])}</h3><p>{symbols}</p></section>"
    )
