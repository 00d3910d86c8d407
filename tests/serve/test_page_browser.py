"""The page in a real Chromium, against the real server with the model that comes along."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page_browser import MARKS, Watched, finished, generate, loops_of

from playwright.sync_api import Browser, Page, expect  # isort: skip

pytestmark = MARKS


def turn(page: Page, letter: str, to: int, way: str | None = None) -> None:
    """Turn a dial by its keys."""
    if way is not None:
        page.locator(f"input[name=way-{letter}][value={way}]").check(force=True)
    slider = page.locator(f"#depth-{letter}")
    slider.press("Home")
    for _ in range(to):
        slider.press("ArrowRight")


def test_a_person_writes_turns_the_dial_and_sees_the_depth_of_each_token(watched: Watched) -> None:
    page = watched.open()
    expect(page.locator("#model")).to_contain_text("mini · 8 loops · context 128")
    assert page.locator(".dial-value:visible").all_inner_texts() == ["Balanced"]
    generate(page, prompt="The old king", max_tokens="24", temperature="0", seed="3")
    loops = loops_of(page)
    assert 10 < len(loops) <= 24 and max(loops) <= 8 and len(set(loops)) > 1
    colours = page.locator(".tokens .token").evaluate_all(
        "all => all.map(one => [one.dataset.loops, getComputedStyle(one).backgroundColor])"
    )
    by_loops = {tuple(one) for one in colours}
    assert len(by_loops) == len({n for n, _ in by_loops}) == len({colour for _, colour in by_loops})
    # The text is that of the API, and so are its loops.
    answer = watched.context.request.post(
        f"{watched.url}/v1/completions",
        data={"model": "mini", "prompt": "The old king", "max_tokens": 24, "temperature": 0, "return_loops": True},
    ).json()
    assert [one["loops"] for one in answer["choices"][0]["alcoda"]["tokens"]] == loops
    shown = page.locator(".tokens .token").evaluate_all("all => all.map(one => one.textContent).join('')")
    assert shown.replace("⏎", "") == answer["choices"][0]["text"]
    assert f"{sum(loops) / len(loops):.1f} loops each" in page.locator("#status").inner_text()

    turn(page, "a", 2, "fixed")
    expect(page.locator(".dial-value").first).to_have_text("3 loops")
    assert page.locator("#depth-a").get_attribute("aria-valuetext").startswith("3 loops: Every token runs 3 loops")
    generate(page)
    assert set(loops_of(page)) == {3}
    page.locator("input[name=way-a][value=threshold]").check(force=True)
    page.locator("#depth-a").press("Home")
    expect(page.locator(".dial-value").first).to_have_text("state change < 0.5")
    generate(page)
    assert sum(loops_of(page)) / len(loops_of(page)) < sum(loops) / len(loops)
    watched.check()


def test_what_a_token_went_through(watched: Watched) -> None:
    page = watched.open()
    generate(page, max_tokens="12", temperature="0")
    panel = page.locator("#token")
    tokens = page.locator(".tokens .token")
    tokens.nth(4).hover()
    expect(panel.locator("svg[role=img]")).to_have_count(2)
    loops = loops_of(page)[4]
    expect(panel.locator("tbody tr")).to_have_count(loops)
    assert f"{loops} loops" in panel.inner_text() and "%" in panel.inner_text()
    assert re.search(r"State changed.*by loop: 1: \d", panel.locator("svg").last.get_attribute("aria-label") or "")
    expect(panel.locator(".cut")).to_have_count(1)  # the tier's threshold
    tokens.nth(0).hover()
    expect(panel).to_contain_text("first token")
    # A token that was clicked stays, whatever is pointed at, until Escape.
    tokens.nth(4).click()
    tokens.nth(6).hover()
    expect(panel).to_contain_text("token 5")
    page.keyboard.press("Escape")
    expect(panel.locator("svg")).to_have_count(0)
    page.uncheck("#trajectories")
    generate(page)
    tokens.nth(4).hover()
    expect(panel).to_contain_text("Trajectories were not kept")
    watched.check()


def test_two_depths_side_by_side(watched: Watched) -> None:
    page = watched.open()
    page.check("#compare")
    assert page.locator(".dial-value").all_inner_texts() == ["Balanced", "Exact"]
    turn(page, "a", 0, "fixed")
    generate(page, prompt="Once upon a time", max_tokens="30", temperature="0")
    a, b = loops_of(page), loops_of(page, "b")
    assert set(a) == {1} and set(b) == {8}
    stats = page.locator("article .stats").all_inner_texts()
    assert len(stats) == 2 and all(f"Mean loops\n{n}.00" in text for n, text in zip((1, 8), stats, strict=True))
    assert all(words in stats[0] for words in ("Tokens/s", "To the first", "Time", "13 % of full depth"))
    verdict = page.locator("#verdict").inner_text()
    assert "A (1 loop) ran 88 % fewer loops a token than B (Exact)" in verdict
    # One loop writes something else; what differs is marked, in words too.
    other = page.locator(".token.other")
    assert other.count() > 0 and "differs" in (other.first.get_attribute("aria-label") or "")
    # Every bar, and the lab's line, in the table too.
    page.locator("#histogram summary").click()
    rows = page.locator("#histogram tbody tr").all_inner_texts()
    assert rows[0].startswith(f"1\t{len(a)} (100 %)\t0 (0 %)") and rows[7].startswith(f"8\t0 (0 %)\t{len(b)} (100 %)")
    assert "The lab’s text (text:valid.txt" in page.locator(".keys").inner_text()
    # Both requests, as commands.
    asked = page.locator("#curl").text_content() or ""
    assert asked.count("curl -N") == 2 and '"loops": 1' in asked and '"exit": "exact"' in asked
    # The same depth twice is the same text.
    turn(page, "a", 7)
    generate(page)
    expect(page.locator("#verdict")).to_contain_text("The texts are the same, token by token.")
    assert other.count() == 0
    watched.check()


def test_by_keyboard_alone(watched: Watched) -> None:
    page = watched.open()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"

    def tab_to(selector: str, most: int = 25) -> None:
        for _ in range(most):
            if page.evaluate(f"document.activeElement?.matches({selector!r}) ?? false"):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"no way to {selector}")

    tab_to("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("The old king")
    tab_to("#depth-a")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".dial-value").first).to_have_text("Fast")
    tab_to("#max-tokens")
    page.keyboard.press("Control+A")
    page.keyboard.type("20")
    page.keyboard.press("Control+Enter")
    finished(page)
    tab_to(".token")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    at = "Number(document.activeElement.dataset.at)"
    assert page.evaluate(at) == 0
    for key, to in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 19),
        ("ArrowRight", 19),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate(at) == to, key
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token tbody tr").first).to_be_visible()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    tab_to("#token .close")
    page.keyboard.press("Escape")
    assert page.evaluate(at) == 1 and page.evaluate("document.activeElement.getAttribute('aria-pressed')") is None
    expect(page.locator("#token svg")).to_have_count(0)
    watched.check()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1440), ("dark", 1440), ("light", 400), ("dark", 400)], ids=lambda x: str(x)
)
def test_light_dark_wide_and_narrow(browser: Browser, page_url: str, scheme: Any, width: int) -> None:
    watched = Watched(
        browser, page_url, color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
    )
    page = watched.open()
    page.check("#compare")
    page.check("#digits")
    generate(page, max_tokens="16")
    page.locator(".tokens .token").nth(3).click()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(x) for x in re.findall(r"\d+", ground)[:3]) / 3
    assert light > 200 if scheme == "light" else light < 60
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    digit = page.locator(".tokens .token").nth(3).evaluate("one => getComputedStyle(one, '::after').content")
    assert digit == f'"{loops_of(page)[3]}"'
    assert page.locator(".tokens .token").first.evaluate("one => getComputedStyle(one).animationName") == "none"
    for summary in page.locator("summary").all():
        summary.click()
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core comes with the extra browser")
    found = axe.Axe().run(page).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []
    watched.check()
    watched.context.close()


def test_which_tokens_differ(watched: Watched) -> None:
    page = watched.open()
    found = page.evaluate(
        """async () => {
          const { differing } = await import("./page/diff.js");
          const told = (a, b) => { const x = differing(a, b); return [x.same, [...x.a].sort(), [...x.b].sort()]; };
          return [
            told([1, 2, 3], [1, 2, 3]), told([1, 2, 3, 4], [1, 9, 3, 4]), told([1, 2], []),
            told([5, 1, 2], [1, 2, 6]), told([], []),
          ];
        }"""
    )
    assert found == [[3, [], []], [1, [1], [1]], [0, [0, 1], []], [0, [0], [2]], [0, [], []]]
