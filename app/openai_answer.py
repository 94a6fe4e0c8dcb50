"""One answer in OpenAI's form, from a run's messages: text up to a stop text, how it ended, what it cost.

Knows wire messages; knows no queue and no web framework.
"""

from __future__ import annotations

import json
import time
from typing import Any

from app.events import head
from app.openai_body import Wanted

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "interrupted": "length"}
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def refusal_body(sentence: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "rate_limit_error" if status == 429 else KINDS.get(status, "server_error" if status > 499 else KINDS[400])
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code}}


class StopText:
    """Finds the first of several texts in text that comes in pieces; holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """What may be shown now; nothing more once `hit`."""
        if self.hit:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.hit, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return "" if self.hit else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


class Answer:
    """Takes a run's messages and says what a client is to be sent.

    `hit` says that a stop text was found, `ended` that nothing more comes, `error` why there is no answer;
    `fault` is then "input", "memory" or "internal".
    """

    def __init__(self, sid: str, wanted: Wanted, *, chat: bool) -> None:
        self.ended = False
        self.error = ""
        self.fault = ""
        self._sid = sid
        self._wanted = wanted
        self._chat = chat
        self._created = int(time.time())
        self._stop = StopText(wanted.stops)
        self._shown: list[str] = []
        self._raw: list[str] = []
        self._why = ""
        self._said = ""
        self._prompt_tokens = 0
        self._tokens = 0
        self._tokens_at_stop: int | None = None
        self._notices: list[str] = []
        self._summary: dict[str, Any] = {}

    @property
    def hit(self) -> bool:
        """Whether a stop text was found."""
        return self._stop.hit

    def fail(self, sentence: str) -> None:
        """The run can't be read any further."""
        self.error, self.fault, self.ended = sentence, "internal", True

    def take(self, body: bytes) -> str:
        """Takes one message and returns the text that may be shown now."""
        kind = head(body)[0]
        if kind not in ("meta", "tok", "err", "end"):
            return ""
        message = json.loads(body)
        if kind == "meta":
            self._prompt_tokens = int(message["prompt_tokens"])
            self._notices = list(message.get("notices", []))
        elif kind == "tok":
            return self._take_pieces(message["p"])
        elif kind == "err":
            self._said = message["msg"]
        else:
            return self._take_end(message)
        return ""

    def _take_pieces(self, pieces: list[str]) -> str:
        shown = []
        for piece in pieces:
            self._tokens += 1
            self._raw.append(piece)
            shown.append(self._stop.push(piece))
            if self._stop.hit and self._tokens_at_stop is None:
                self._tokens_at_stop = self._tokens
        return self._show("".join(shown))

    def _take_end(self, message: dict[str, Any]) -> str:
        self.ended, self._why = True, message["why"]
        self._summary = message["summary"] if isinstance(message["summary"], dict) else {}
        if self._why == "error":
            self.error = str(self._summary.get("error") or self._said or "the run failed.")
            self.fault = str(self._summary.get("fault", "internal"))
            return ""
        if self._why == "interrupted" and not self._raw:
            self.error, self.fault = "the server ended this run before its first token: try again.", "memory"
            return ""
        if self.hit:
            return ""
        # Bytes of an unfinished character come as text only when the run has ended.
        raw = "".join(self._raw)
        whole = str(self._summary.get("text", raw))
        rest = self._stop.push(whole[len(raw) :]) if whole.startswith(raw) and len(whole) > len(raw) else ""
        return self._show(rest + self._stop.rest())

    def _show(self, text: str) -> str:
        self._shown.append(text)
        return text

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        text = "".join(self._shown)
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return self._frame(kind, content, self._finish()) | {"usage": self._usage(), "notices": self._notices}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream."""
        return self._piece({"role": "assistant", "content": ""} if self._chat else "", None)

    def chunk(self, text: str) -> dict[str, Any]:
        """A chunk of a stream with some text."""
        return self._piece({"content": text} if self._chat else text, None)

    def closing(self) -> list[dict[str, Any]]:
        """The last chunks of a stream."""
        last = [self._piece({} if self._chat else "", self._finish())]
        if self._wanted.usage_in_stream:
            kind = "chat.completion.chunk" if self._chat else "text_completion"
            usage = {"choices": [], "usage": self._usage(), "notices": self._notices}
            last.append(self._frame(kind, {}, None) | usage)
        return last

    def _piece(self, content: Any, finish: str | None) -> dict[str, Any]:
        if self._chat:
            return self._frame("chat.completion.chunk", {"delta": content}, finish)
        return self._frame("text_completion", {"text": content}, finish)

    def _frame(self, kind: str, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{self._sid}",
            "object": kind,
            "created": self._created,
            "model": self._wanted.request.model,
            "session": self._sid,
            "choices": [{"index": 0, **content, "finish_reason": finish, "logprobs": None}],
        }

    def _finish(self) -> str:
        return "stop" if self.hit else FINISH.get(self._why, "stop")

    def _usage(self) -> dict[str, Any]:
        tokens = self._tokens if self._tokens_at_stop is None else self._tokens_at_stop
        settings = self._summary.get("settings") or {}
        kv = dict(self._summary.get("kv") or {})
        kv |= {name: settings[name] for name in ("kv_budget", "quant_share", "bits") if name in settings}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
            "kv": kv | {"system": self._wanted.system},
            "timing": self._summary.get("timing"),
            "metrics": self._summary.get("metrics"),
        }
