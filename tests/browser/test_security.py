"""The content security policy in a real browser: the page works under it, and what is put into it does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.server import ServerProcess

ATTACK = """() => {
  const host = document.createElement("div");
  host.innerHTML = '<img src="data:," onerror="window.taken = 1"><a href="javascript:window.taken = 2">x</a>';
  document.body.append(host);
  host.querySelector("a").click();
  const script = document.createElement("script");
  script.textContent = "window.taken = 3";
  document.body.append(script);
  const far = document.createElement("script");
  far.src = "https://elsewhere.invalid/x.js";
  document.body.append(far);
}"""


def test_the_page_works_under_its_policy_and_foreign_script_does_not_run(browser: Any, tmp_path: Path) -> None:
    command = ("-m", "tests.browser.made_up_server", "40", "20")
    with ServerProcess(tmp_path, command) as server:
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: message.type == "error" and said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(server.url)
        page.wait_for_function("window.qePage && window.qeBoards && window.qeBoards.size > 0", timeout=60_000)
        page.click("#qe-theme-button")
        assert "dark" in page.evaluate("document.body.className")
        page.click("#qe-run")
        page.wait_for_function(
            "document.querySelector('#qe-live-status').innerText.includes('inished')", timeout=60_000
        )
        assert [line for line in said if "Content Security Policy" in line] == []
        assert page.evaluate("document.cookie") == "", "a script can read the visitor's cookie"
        page.evaluate(ATTACK)
        page.wait_for_timeout(300)
        assert page.evaluate("window.taken") is None
        assert sum("Content Security Policy" in line for line in said) >= 3
        page.close()


HOSTED = "import os; os.environ['QEVICT_HOSTED'] = '1'; from tests.browser.made_up_server import main; main(40, 40.0)"
LISTED = "fetch('qe/sessions').then((answer) => answer.json()).then((found) => found.sessions.map((one) => one.id))"


def test_a_run_that_is_started_on_the_page_belongs_to_that_browser(browser: Any, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, ("-c", HOSTED)) as server:
        lists = []
        for _ in range(2):
            place = browser.new_context()
            page = place.new_page()
            page.goto(server.url)
            page.wait_for_function("window.qeBoards && window.qeBoards.size > 0", timeout=60_000)
            page.click("#qe-run")
            page.wait_for_function(
                "document.querySelector('#qe-live-status').innerText.includes('inished')", timeout=60_000
            )
            lists.append(page.evaluate(LISTED))
            place.close()
        assert [len(found) for found in lists] == [1, 1], "each browser sees its own run"
        assert lists[0] != lists[1]
