"""The page at `/` in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.support import ENGINE, PROMPT, LiveServer, flags

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.exhaustive
SECONDS = 30_000  # in milliseconds, until an answer has come


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    """Playwright's Chromium, or the system's."""
    with playwright.sync_playwright() as driver:
        own = Path(driver.chromium.executable_path)
        path = own if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")
        if path is None:
            pytest.skip("no Chromium: `playwright install chromium`, or install the system's")
        # Only this server's pages are opened; in containers the sandbox often cannot start.
        launched = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


class Opened:
    """The page, and what went wrong in it."""

    def __init__(self, browser: playwright.Browser, url: str, **options: object) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda r: r.url.startswith(url) or self.elsewhere.append(r.url))
        self.page.goto(url)

    def _on_console(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def ready(self) -> None:
        playwright.expect(self.page.locator("#health")).to_have_text("Ready")

    def generate(self, **values: object) -> None:
        """With sampling parameters; waits for the end."""
        for name, value in values.items():
            self.page.fill(f"#{name}", str(value))
        self.page.click("#generate")
        playwright.expect(self.page.locator("#status")).to_contain_text("Done:", timeout=SECONDS)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def number(self, selector: str) -> float:
        return float(re.sub(r"[^\d.]", "", self.page.inner_text(selector)))


@pytest.fixture
def opened(browser: playwright.Browser, server: LiveServer) -> Iterator[Opened]:
    made = Opened(browser, server.url)
    made.ready()
    yield made
    made.context.close()
    assert (made.problems, made.elsewhere) == ([], [])


def test_tokens_are_coloured_by_origin_and_compared(opened: Opened, server: LiveServer) -> None:
    opened.generate(temperature=0)  # the first steps are recorded, which takes its time
    server.http.post("/flush_cache").raise_for_status()
    opened.generate(temperature=0)
    want = server.http.post(
        "/generate",
        json={
            "input_ids": server.http.post(
                "/tokenize",
                json={
                    "messages": [{"role": "user", "content": opened.page.input_value("#prompt")}]
                },
            ).json()["tokens"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 200},
        },
    ).json()
    info = want["meta_info"]
    for panel in ("#spec", "#plain"):
        assert opened.page.locator(f"{panel} .text").text_content() == want["text"]
        assert opened.count(f"{panel} .token") == info["completion_tokens"]
    drafts, steps = info["spec_num_correct_drafts"], info["spec_verify_ct"]
    assert opened.count("#spec .token.draft") == opened.number("#n-draft") == drafts
    assert opened.count("#spec .token.plain") == opened.number("#n-plain") == 1
    assert opened.count("#spec .token.bonus") == info["completion_tokens"] - drafts - 1
    assert opened.count("#plain .token.plain") == info["completion_tokens"]
    assert opened.count("#bars .bar") == steps
    mean = sum(info["spec_accept_lengths"]) / steps
    assert opened.number("#mean b") == pytest.approx(mean, abs=0.006)
    assert "Identical" in opened.page.inner_text("#same")
    assert opened.number("#speedup") >= 1 and "×" in opened.page.inner_text("#speedup")
    assert opened.number("#spec .rate b") > opened.number("#plain .rate b")
    backgrounds = {
        opened.page.locator(f"#spec .token.{kind}").first.evaluate(
            "(node) => getComputedStyle(node).backgroundColor"
        )
        for kind in ("draft", "bonus", "plain")
    }
    assert len(backgrounds) == 3


def test_steps_can_be_picked_and_runs_replayed(opened: Opened) -> None:
    page = opened.page
    opened.generate(temperature=0)
    page.focus("#bars")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#detail").startswith("Step 2:")
    picked = opened.count("#spec .token.picked")
    assert picked > 1
    page.hover("#bars .bar >> nth=0")
    assert page.inner_text("#detail").startswith("Step 1:")
    page.select_option("#speed", "0.1")
    page.click("#replay")
    playwright.expect(page.locator("#plain .token.later").first).to_be_attached()
    page.click("#stop")
    playwright.expect(page.locator(".later")).to_have_count(0)
    page.select_option("#speed", "1")
    page.click("#replay")
    playwright.expect(page.locator("#generate")).to_be_enabled(timeout=SECONDS)
    assert opened.count(".later") == 0


def test_stop_ends_the_request(opened: Opened, server: LiveServer) -> None:
    page = opened.page
    page.click("#mode-text + span")
    page.fill("#prompt", PROMPT)
    page.fill("#max_new_tokens", "4000")
    page.click("#generate")
    playwright.expect(page.locator("#spec .token").nth(20)).to_be_attached(timeout=SECONDS)
    page.click("#stop")
    playwright.expect(page.locator("#status")).to_have_text("Stopped.")
    server.wait_idle()
    shown = opened.count("#spec .token")
    assert 20 < shown < 4000
    opened.generate(max_new_tokens=5)  # it can go on
    assert opened.count("#spec .token") == 5


def test_markup_in_a_text_stays_text(opened: Opened) -> None:
    page = opened.page
    page.click("#mode-text + span")
    page.fill("#prompt", "<img src=x onerror=alert(1)>" * 8 + "<img")
    opened.generate(max_new_tokens=20, temperature=0)
    assert opened.count("#stage img") == 0


def stream(*events: dict[str, object]) -> str:
    """A body of server-sent events."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def chunk(texts: list[str], lengths: list[int], drafts: int, **info: object) -> dict[str, object]:
    """An event of `/generate`; `drafts`: how many were proposed."""
    known = {
        "e2e_latency": 0.1 * len(texts),
        "completion_tokens": len(texts),
        "finish_reason": None,
        "spec_verify_ct": len(lengths),
        "spec_accept_lengths": lengths,
        "spec_num_proposed_drafts": drafts,
        "spec_num_correct_drafts": sum(length - 1 for length in lengths),
    }
    ids = list(range(len(texts)))
    meta_info = {**known, **info}
    return {"output_ids": ids, "token_texts": texts, "text": "", "meta_info": meta_info}


def _fulfill(route: playwright.Route, *, body: str) -> None:
    route.fulfill(body=body)


def test_origins_of_every_kind_of_step(opened: Opened) -> None:
    """A step without drafts, several steps in one event, a character of two tokens, a cut step."""
    end = {"finish_reason": {"type": "length", "length": 9}, "spec_num_correct_drafts": 5}
    body = stream(
        chunk(["a"], [], 0),
        chunk(["a", "b"], [1], 0),
        chunk(["a", "b", "c", "", "\u00e9", "d", "\n"], [1, 3, 2], 30),
        chunk(["a", "b", "c", "", "\u00e9", "d", "\n", "e", "f"], [1, 3, 2, 2], 45, **end),
    )
    opened.page.route("**/generate", partial(_fulfill, body=body))
    opened.page.uncheck("#compare")
    opened.generate()
    kinds = [
        (node.get_attribute("class") or "").split()[1]
        for node in opened.page.locator("#spec .token").all()
    ]
    draft, bonus, plain = "draft", "bonus", "plain"
    assert kinds == [plain, plain, draft, draft, bonus, draft, bonus, draft, draft]
    assert opened.page.locator("#spec .text").text_content() == "abc\u00e9d\nef"
    shown = [bar.locator("i").count() for bar in opened.page.locator("#bars .bar").all()]
    assert shown == [1, 2, 2, 1]  # plain; drafts and bonus, twice; drafts only


def compared(opened: Opened, spec: str, plain: str) -> str:
    """What is said of the speed-up after two runs with these bodies."""

    def answer(route: playwright.Route) -> None:
        drafts = route.request.post_data_json["sampling_params"].get("speculative") is not False
        route.fulfill(body=spec if drafts else plain)

    opened.page.route("**/generate", answer)
    opened.page.click("#generate")
    playwright.expect(opened.page.locator("#generate")).to_be_enabled()
    opened.page.unroute("**/generate")
    return opened.page.inner_text("#speedup").replace("\n", " ").strip()


def test_a_ratio_needs_accepted_drafts_and_two_whole_runs(opened: Opened) -> None:
    end = {"finish_reason": {"type": "length", "length": 4}}
    texts = list("abcd")
    first = chunk(["a"], [], 0)
    good = stream(first, chunk(texts, [3], 15, e2e_latency=0.2, **end))
    useless = stream(first, chunk(texts, [1, 1, 1], 45, e2e_latency=0.2, **end))
    undrafted = stream(first, chunk(texts, [1, 1, 1], 0, e2e_latency=0.2, **end))
    plain = stream(first, chunk(texts, [1, 1, 1], 0, e2e_latency=0.4, **end))
    short = stream(first, chunk(texts, [3], 15, e2e_latency=0.14, **end))
    cut = stream(first, chunk(texts, [3], 15))
    assert compared(opened, good, plain) == "3.0× speed-up"
    assert compared(opened, useless, plain) == "– speed-up: no draft was accepted"
    assert compared(opened, undrafted, plain) == "– speed-up: no step had drafts"
    few = "– speed-up: too short to measure, generate more tokens"
    assert compared(opened, short, plain) == few
    assert compared(opened, good, cut) == "– speed-up: once both runs have ended"


def test_a_new_run_forgets_the_step_that_was_picked(opened: Opened) -> None:
    page = opened.page
    hint = page.inner_text("#detail")
    opened.generate(temperature=0, max_new_tokens=20)
    page.hover("#bars .bar >> nth=0")
    assert page.inner_text("#detail").startswith("Step 1:")
    page.mouse.move(0, 0)
    opened.generate(max_new_tokens=10)
    assert page.inner_text("#detail") == hint


def test_figures_of_an_engine_that_is_gone_are_not_shown(browser: Any, server: LiveServer) -> None:
    opened = Opened(browser, server.url)
    opened.ready()
    gauges = [opened.page.locator(f"#g-{name}") for name in ("running", "waiting", "accept")]
    playwright.expect(gauges[0]).to_have_text("0")
    body = json.dumps({"error": {"message": "The engine is restarting."}})
    opened.page.route("**/v1/loads", lambda route: route.fulfill(status=503, body=body))
    playwright.expect(opened.page.locator("#health")).to_have_text("Not ready")
    for gauge in gauges:
        playwright.expect(gauge).to_have_text("–")
    opened.page.unroute("**/v1/loads")
    opened.ready()
    playwright.expect(gauges[0]).to_have_text("0")
    opened.context.close()


def test_different_texts_are_shown(opened: Opened) -> None:
    def other_seed(route: playwright.Route) -> None:
        body = route.request.post_data_json
        if body["sampling_params"].get("speculative") is False:
            body["sampling_params"]["sampling_seed"] += 1
        route.continue_(post_data=json.dumps(body))

    opened.page.route("**/generate", other_seed)
    opened.page.click("#mode-text + span")
    opened.page.fill("#prompt", "import ")
    opened.generate(temperature=2, max_new_tokens=30)
    assert "The texts differ from token" in opened.page.inner_text("#same")
    assert "texts differ" in opened.page.inner_text("#status")
    assert opened.count("#spec .token.differs") == opened.count("#plain .token.differs") == 1


def test_errors_of_a_stream_are_shown(opened: Opened) -> None:
    page = opened.page
    error = {"error": {"message": "The engine has died.", "type": "x", "param": None, "code": None}}
    bodies = {
        "The engine has died.": stream(chunk(["a"], [], 0), error),
        "The connection ended before the answer did.": "",
    }
    for message, body in bodies.items():
        page.route("**/generate", partial(_fulfill, body=body))
        page.click("#generate")
        playwright.expect(page.locator("#error")).to_have_text(message)
        playwright.expect(page.locator("#generate")).to_be_enabled()


def test_bad_values_are_explained(opened: Opened) -> None:
    page = opened.page
    page.fill("#top_p", "2")
    page.click("#generate")
    playwright.expect(page.locator("#error")).to_contain_text("Top p")
    page.fill("#top_p", "1")
    page.fill("#prompt", "")
    page.click("#generate")
    playwright.expect(page.locator("#error")).to_have_text("The prompt is empty.")
    page.fill("#prompt", "again")
    opened.generate(max_new_tokens=3)
    assert page.is_hidden("#error")


@pytest.mark.parametrize("width", [360, 768, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_width_and_scheme(
    browser: playwright.Browser, server: LiveServer, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800}
    opened = Opened(
        browser, server.url, viewport=size, color_scheme=scheme, reduced_motion="reduce"
    )
    opened.ready()
    if width < 900:
        opened.page.click("summary")
    opened.generate(max_new_tokens=120)
    wide = opened.page.locator("html").evaluate("(node) => node.scrollWidth")
    assert wide <= width
    assert _low_contrast(opened.page) == []
    unnamed = opened.page.locator("body").evaluate(UNNAMED)
    assert unnamed == []
    opened.context.close()
    assert opened.problems == []


# Controls without a label that a screen reader could say.
UNNAMED = """(body) => [...body.querySelectorAll("input, textarea, select, button")]
    .filter((node) => !(node.labels?.length || node.textContent.trim()))
    .map((node) => node.outerHTML)"""

COLOURS = """(body) => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = channels(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  return [...body.querySelectorAll("*")]
    .filter((node) => node.checkVisibility() && !node.matches(":disabled, :disabled *, option")
      && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
    .map((node) => [node.tagName + "." + node.className + " " + node.textContent.slice(0, 20),
      channels(getComputedStyle(node).color).slice(0, 3), behind(node)]);
}"""


def _low_contrast(page: playwright.Page) -> list[str]:
    """Texts under WCAG's 4.5 : 1."""
    return [
        name
        for name, text, behind in page.locator("body").evaluate(COLOURS)
        if _contrast(text, behind) < 4.5
    ]


def _contrast(a: list[float], b: list[float]) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: list[float]) -> float:
    parts = [channel / 255 for channel in colour]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_the_key_is_asked_for_and_kept_in_memory(browser: playwright.Browser) -> None:
    with LiveServer(*flags(**ENGINE), key="secret", FORERUN_API_KEY="secret") as server:
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/server_info").status_code == 401
        opened = Opened(browser, server.url)
        page = opened.page
        for given, right in (("wrong", False), ("secret", True)):
            playwright.expect(page.locator("#key-dialog")).to_be_visible()
            page.fill("#key", given)
            page.keyboard.press("Enter")
            if not right:
                playwright.expect(page.locator("#key-error")).to_be_visible()
        opened.ready()
        opened.generate(max_new_tokens=5)
        state = opened.context.storage_state()
        assert (state["cookies"], state["origins"]) == ([], [])
        assert "secret" not in page.content()
        page.reload()
        playwright.expect(page.locator("#key-dialog")).to_be_visible()
        opened.context.close()
        assert opened.elsewhere == []


def test_a_server_without_drafts_is_plain(browser: playwright.Browser) -> None:
    settings = {**ENGINE, "speculative_algorithm": "NONE"}
    with LiveServer(*flags(**settings)) as server:
        opened = Opened(browser, server.url)
        opened.ready()
        opened.generate(max_new_tokens=12)
        assert opened.count("#spec .token.plain") == 12
        assert opened.page.is_disabled("#compare") and opened.page.is_hidden("#plain")
        opened.context.close()
        assert opened.problems == []
