"""The page in a real Chromium where something goes wrong, or somebody wants it to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_browser import MARKS, Watched, generate, loops_of, serve

from playwright.sync_api import Browser, Route, expect  # isort: skip

pytestmark = MARKS


HOSTILE = [
    "<img src=x onerror='window.broken=1'>",
    "<script>window.broken=1</script>",
    "</li></ol><h1>no</h1>",
    "\u202e&lt;b&gt;",
]


def hostile(route: Route) -> None:
    """An answer whose tokens are markup."""
    tokens = [
        {
            "text": text,
            "id": i,
            "loops": i + 1,
            "steps": [{"state_change": 0.5, "kl": None, "top": [[text, -0.1]]}] * (i + 1),
        }
        for i, text in enumerate(HOSTILE)
    ]
    key = "delta" if "chat" in route.request.url else "text"
    events: list[dict[str, Any]] = [
        {
            "choices": [
                {key: {"content": "x"} if key == "delta" else "x", "finish_reason": None, "alcoda": {"tokens": [one]}}
            ]
        }
        for one in tokens
    ]
    events.append({"choices": [{"finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_what_a_model_writes_is_only_text(watched: Watched) -> None:
    page = watched.open()
    page.route("**/v1/completions", hostile)
    headings = page.locator("h1").count()
    generate(page, prompt="<b>bold</b>")
    assert page.locator(".tokens .token").all_inner_texts() == HOSTILE
    page.locator(".tokens .token").first.click()
    assert HOSTILE[0] in page.locator("#token").inner_text()
    assert page.locator("main img, main script, main b").count() == 0 and page.locator("h1").count() == headings
    assert page.evaluate("window.broken") is None
    # And where somebody tried, the browser would refuse it.
    page.evaluate("try { document.body.innerHTML = '<i>no</i>' } catch (error) { window.refused = error.name }")
    assert page.evaluate("window.refused") == "TypeError" and page.locator("i").count() == 0


def test_a_chat_goes_on(watched: Watched) -> None:
    def models(route: Route) -> None:
        found = route.fetch().json()
        for one in found["data"]:
            one["alcoda"]["is_chat"] = True
        route.fulfill(json=found)

    asked: list[Any] = []

    def chat(route: Route) -> None:
        asked.append(route.request.post_data_json)
        hostile(route)

    page = watched.page
    page.route("**/v1/models", models)
    page.route("**/v1/chat/completions", chat)
    watched.open()
    expect(page.locator("#prompt-label")).to_have_text("Message")
    generate(page, prompt="Who are you?")
    expect(page.locator("#prompt")).to_have_value("")
    generate(page, prompt="And now?")
    said = "".join(HOSTILE)
    roles = [(one["role"], one["content"]) for one in asked[1]["messages"]]
    assert roles == [("user", "Who are you?"), ("assistant", said), ("user", "And now?")]
    assert page.locator(".turn").count() == 2 and "Who are you?" in page.locator(".turn").first.inner_text()
    page.check("#compare")  # a second depth joins where the first one stands
    generate(page, prompt="Both?")
    assert [len(one["messages"]) for one in asked[2:]] == [5, 5] and asked[2]["messages"] == asked[3]["messages"]
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    watched.check()


def test_stop_keeps_what_is_there(watched: Watched) -> None:
    page = watched.open()
    expect(page.locator("#stop")).to_be_disabled()
    page.fill("#max-tokens", "120")
    page.click("#generate")
    page.locator(".tokens .token").nth(2).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped")
    n = len(loops_of(page))
    assert 3 <= n < 120 and page.locator(".lane-state").first.inner_text() == "stopped"
    assert page.evaluate("document.activeElement.id") == "generate"
    generate(page, max_tokens="5")
    assert len(loops_of(page)) == 5
    watched.check()


def test_errors_say_the_way_out(watched: Watched) -> None:
    page = watched.open()
    page.fill("#prompt", "word " * 200)
    page.click("#generate")
    problem = page.locator("#problem")
    expect(problem).to_contain_text("this model's context holds 128: shorten prompt")
    assert problem.get_attribute("role") == "alert"
    page.route("**/v1/completions", lambda route: route.abort())
    page.click("#generate")
    expect(problem).to_contain_text("The server does not answer. Is it still running?")
    page.unroute("**/v1/completions")
    page.route("**/v1/completions", lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, body="busy"))
    page.click("#generate")
    expect(problem).to_contain_text("Try again in 7 s")
    page.unroute("**/v1/completions")
    page.route("**/v1/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=""))
    page.click("#generate")
    expect(problem).to_contain_text("ended before it was whole")
    page.unroute("**/v1/completions")
    generate(page, prompt="Once", max_tokens="3")
    expect(problem).to_be_hidden()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    with serve(tmp_path, "--api-key", "sesame") as url:
        watched = Watched(browser, url)
        page = watched.page
        page.goto(url)
        field = page.locator("#key")
        expect(field).to_be_focused()
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#problem")).to_contain_text("Give the key that the server was started with.")
        field.fill("sesame")
        field.press("Enter")
        expect(page.locator("#dials .dial")).to_have_count(2)
        expect(page.locator("#key-form")).to_be_hidden()
        generate(page, max_tokens="4")
        assert len(loops_of(page)) == 4
        assert page.evaluate("[JSON.stringify(localStorage), document.cookie]") == ["{}", ""]
        assert "sesame" not in page.content()
        page.reload()
        expect(page.locator("#dials .dial")).to_have_count(2)  # the tab knows it still
        other = watched.context.new_page()
        other.goto(url)
        expect(other.locator("#key")).to_be_visible()
        watched.context.close()
