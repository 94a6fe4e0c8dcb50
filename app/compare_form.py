"""The comparison's form: what the Compare tab holds, checked, and made into what a comparison needs.

Every refusal is one sentence in the reader's language. Knows no components: values come as a plain mapping.
"""

from __future__ import annotations

from app.compare_request import LEAST, MOST, CompareRequest
from app.forms import FormError, RunForm
from app.texts import text

UNITS = {"share": (0.1, 100.0), "tokens": (1.0, 1e9), "bytes": (0.001, 1e12)}
"""Units of the budget (per cent of FullKV, tokens, kB) with the smallest and the largest number."""


class CompareForm(RunForm):
    """The tab's values, by field name, read in one language; fields that a run has too are read in the same way."""

    def comparison(self, match_to: str = "") -> CompareRequest:
        """The comparison that the form asks for.

        Args:
            match_to: a system whose bytes QEvict gets instead of the budget; empty = none.

        Raises:
            FormError: a field is empty, not a number, or out of range; fewer than two or more than four systems.
        """
        systems = tuple(str(name) for name in self._values.get("systems") or ())
        if len(systems) < LEAST:
            raise FormError(text(self._lang, "compare.too_few"))
        if len(systems) > MOST:
            raise FormError(text(self._lang, "compare.too_many", more=len(systems) - MOST))
        prompt, title = self.prompt()
        return CompareRequest(
            prompt=prompt,
            systems=systems,
            budget=self._budget(),
            mode=str(self._values.get("mode") or "teacher"),
            max_new_tokens=self._whole("new_tokens", 1, self._settings.max_new_tokens),
            match_to=match_to,
            model=self.model(),
            device=str(self._values.get("device") or "auto"),
            kv_dtype=str(self._values.get("kv_dtype") or "float16"),
            ignore_eos=bool(self._values.get("ignore_eos")),
            title=title,
            lang=self._lang,
        )

    def _budget(self) -> dict[str, float]:
        unit = str(self._values.get("unit") or "share")
        if unit not in UNITS:
            raise self._error("not_a_choice", field=self._name("budget"), value=unit[:40])
        amount = self._number("budget", *UNITS[unit])
        if unit == "share":
            return {"share": amount / 100}
        return {"tokens": amount} if unit == "tokens" else {"total_bytes": amount * 1000}

    def _name(self, field: str) -> str:
        return text(self._lang, "compare.budget") if field == "budget" else super()._name(field)
