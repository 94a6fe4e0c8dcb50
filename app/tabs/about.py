"""The About tab: the method in one picture, the tiers, the glossary, what it does not do, versions, sources.

Everything here is text and one drawing made from it; knows no session and no run.
"""

from __future__ import annotations

from html import escape

import gradio as gr

from app.glossary import glossary_html
from app.labels import Labels
from app.texts import DEFAULT, text
from app.versions import versions
from engine.config import QEvictConfig

TIERS = (
    ("sink", "tier.sink", "about.tier_sink"),
    ("local", "tier.local", "about.tier_local"),
    ("full", "tier.full", "about.tier_full"),
    ("quant", "tier.quant", "about.tier_quant"),
    ("evicted", "tier.evicted", "about.tier_evicted"),
)

LIMITS = ("about.limit_small", "about.limit_cpu", "about.limit_row", "about.limit_reference", "about.limit_promotion")
SOURCES = ("about.source_method", "about.source_related", "about.source_model", "about.source_texts")


def build(labels: Labels) -> None:
    """Lays the tab out inside the current Blocks context."""
    labels.bind_with(
        gr.HTML(about_html(DEFAULT), elem_id="qe-about", padding=False),
        lambda lang: {"value": about_html(lang)},
    )


def about_html(lang: str) -> str:
    """The whole tab as HTML; every word is escaped."""

    def say(key: str) -> str:
        return escape(text(lang, key))

    lead = escape(text(lang, "about.lead", window=QEvictConfig().window_size))
    tiers = "".join(
        f'<li><span class="qe-page-swatch qe-page-swatch-{name}" aria-hidden="true"></span>'
        f"<div><strong>{say(title)}</strong><br>{say(body)}</div></li>"
        for name, title, body in TIERS
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(number)}</td></tr>' for name, number in versions()
    )
    limits = "".join(f"<li>{say(key)}</li>" for key in LIMITS)
    sources = "".join(f"<li>{say(key)}</li>" for key in SOURCES)
    return f"""<article class="qe-doc">
<h2>{say("about.heading")}</h2><p class="qe-lead">{lead}</p>
<h3>{say("about.picture_title")}</h3>{picture(lang)}
<h3>{say("about.tiers_title")}</h3><ul class="qe-tiers">{tiers}</ul>
{glossary_html(lang)}
<h3>{say("about.limits_title")}</h3><ul class="qe-points">{limits}</ul>
<h3>{say("about.versions_title")}</h3>
<table class="qe-table qe-page-narrow"><thead><tr><th scope="col">{say("about.version_name")}</th>
<th scope="col">{say("about.version_number")}</th></tr></thead><tbody>{rows}</tbody></table>
<h3>{say("about.sources_title")}</h3><ul class="qe-points">{sources}</ul>
</article>"""


def picture(lang: str) -> str:
    """The method as inline SVG, coloured by the page's CSS variables so that it follows the theme."""

    def say(key: str) -> str:
        return escape(text(lang, f"about.picture_{key}"))

    def box(x: int, y: int, tier: str, key: str, width: int = 300) -> str:
        return (
            f'<g><rect class="p-box" x="{x}" y="{y}" width="{width}" height="80" rx="6"/>'
            f"{_glyph(x + 22, y + 18, tier)}"
            f'<text class="p-name" x="{x + 82}" y="{y + 35}">{say(key)}</text>'
            f'<text class="p-sub" x="{x + 82}" y="{y + 58}">{say(f"{key}_sub")}</text></g>'
        )

    def arrow(path: str, kind: str = "") -> str:
        return f'<path class="p-arrow {kind}" d="{path}" marker-end="url(#qe-head)"/>'

    def word(x: int, y: int, key: str, anchor: str = "start") -> str:
        return f'<text class="p-word" x="{x}" y="{y}" text-anchor="{anchor}">{say(key)}</text>'

    segments = (("sink", 150, 34), ("local", 184, 190), ("full", 374, 300), ("quant", 674, 306))
    bar = "".join(
        f'<rect x="{x}" y="414" width="{width}" height="26" style="fill:var(--qe-{tier})"/>'
        for tier, x, width in segments
    )
    return f"""<svg class="qe-picture" viewBox="0 0 1040 470" role="img" aria-labelledby="qe-pt qe-pd">
<title id="qe-pt">{say("title")}</title><desc id="qe-pd">{say("desc")}</desc>
<defs><marker id="qe-head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">
<path class="p-head" d="M0 0 10 5 0 10z"/></marker></defs>
{box(150, 10, "sink", "sink", 280)}
{box(150, 145, "local", "local", 280)}
<text class="p-word" x="64" y="172" text-anchor="middle">{say("new")}</text>
{arrow("M10 186 H146")}
{arrow("M430 186 H502")}{word(466, 172, "ages", "middle")}
<rect class="p-rank" x="506" y="142" width="164" height="88" rx="44"/>
<text class="p-name" x="588" y="180" text-anchor="middle">{say("rank")}</text>
<text class="p-sub" x="588" y="205" text-anchor="middle">{say("rank_sub")}</text>
{arrow("M648 152 C684 96 680 50 716 50")}{arrow("M670 186 H716")}
{arrow("M648 220 C684 276 680 320 716 320")}
{box(720, 10, "full", "full")}{box(720, 145, "quant", "int2")}{box(720, 280, "evicted", "evicted")}
{arrow("M800 90 V141", "p-down")}{word(812, 122, "demote")}
{arrow("M930 145 V94", "p-up")}{word(942, 122, "promote")}
{arrow("M800 225 V276", "p-down")}{word(812, 257, "evict")}
<text class="p-word" x="150" y="402">{say("attend")}</text>
{bar}<path class="p-budget" d="M980 400 V452"/>
<text class="p-word" x="972" y="402" text-anchor="end">{say("budget")}</text>
</svg>"""


def _glyph(x: int, y: int, tier: str) -> str:
    """Three bars as the board draws them: tall, low with a slot, or hollow."""
    color = f"var(--qe-{tier})"
    bars = []
    for index in range(3):
        left = x + index * 16
        if tier == "quant":
            bars.append(f'<rect x="{left}" y="{y + 24}" width="11" height="9" style="fill:{color}"/>')
            bars.append(f'<rect x="{left}" y="{y + 35}" width="11" height="9" style="fill:{color}"/>')
        elif tier == "evicted":
            bars.append(
                f'<rect x="{left + 1}" y="{y + 20}" width="9" height="23" style="fill:none;stroke:{color};'
                'stroke-width:2"/>'
            )
        else:
            bars.append(f'<rect x="{left}" y="{y}" width="11" height="44" style="fill:{color}"/>')
    return "".join(bars)
