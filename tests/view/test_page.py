"""The report's page in a browser: what a reader does with it, and what it may never do."""

from __future__ import annotations

import shutil

import pytest

from .pages import episode, filled, message, turn

BROWSER = next(filter(None, map(shutil.which, ["chromium", "google-chrome", "chrome"])), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on the path"),
]

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
COUNT_NODES = """() => {
    const walker = document.createTreeWalker(document, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
    let nodes = 0;
    while (walker.nextNode()) nodes += 1;
    return nodes;
}"""


def episodes():
    """Two of a group, one with markup in its tokens, one that forks, one without tokens."""
    call = {"name": "add", "arguments": {"numbers": [1, 2]}}
    said = message("assistant", None, tool_calls=[call])
    picture = message("user", "What is this?", images=["dot"])
    forked = [
        turn(0, "Begin.", ["First", " things"]),
        turn(1, "Help.", ["A", " helper"], row=1, parent=-1, reward=0.5),
        turn(2, "On.", ["And", " then"], parent=0, said=said),
    ]
    in_group = {"group": 7, "stop": "length"}
    return [
        episode(0, [turn(0, "Where?", ["In", " the", " attic", "."])], sample=0, **in_group),
        episode(1, [turn(0, "Where?", ["In", " the", " cellar", "!"])], sample=1, **in_group),
        episode(2, [turn(0, "Bad?", ["<script>alert(1)</script>", "</script>"])], rejected="stale"),
        episode(3, forked, head=8, tail=9),
        episode(4, [turn(0, "?", [], given=[picture], said=message("assistant", "Größe"))]),
    ]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a report; at the end nothing may have been asked of a network, nor have gone wrong."""
    wrong = []

    def visit(address="", of=None, **size):
        file = tmp_path / "report.html"
        file.write_text(of or filled(episodes(), f"dot image/png {DOT}"))
        page = browser.new_page(viewport={"width": 1300, "height": 900, **size})
        page.set_default_timeout(10_000)
        page.on("console", lambda line: wrong.append(line.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url),
        )
        page.goto(f"{file.as_uri()}{address}")
        page.wait_for_selector("#page .turn, #page .branch, #page .column .turn")
        return page

    yield visit
    assert wrong == []


def names(page):
    return page.locator(".row .name").all_inner_texts()


def change(page, name, value):
    page.locator(f"[name={name}]").evaluate("(field, value) => { field.value = value; }", value)
    page.locator(f"[name={name}]").dispatch_event("input", {"bubbles": True})
    page.wait_for_url(lambda url: f"{name}={value}" in url)


def test_search_filters_the_list_and_jumps_between_hits(visit):
    page = visit()
    page.keyboard.press("/")
    page.keyboard.type("THE")
    page.wait_for_selector("text=3 hits in 3 episodes")
    assert names(page) == ["Group 7 · sample 0", "Group 7 · sample 1", "Episode 3"]
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    assert page.locator(".current").inner_text() == " the"
    page.keyboard.press("n")
    page.wait_for_selector("h2:has-text('Episode 1')")
    page.wait_for_selector(".current")
    page.keyboard.press("Shift+N")
    page.wait_for_selector("h2:has-text('Episode 0')")


def test_hits_in_messages_and_in_replies_without_tokens_are_marked(visit):
    page = visit("#episode=4&search=größe")
    page.wait_for_selector(".hit:text('Größe')")
    page = visit("#episode=3&search=elp")
    assert page.locator(".hit").all_inner_texts() == ["elp", " helper"]


def test_filters_and_order(visit):
    page = visit()
    change(page, "sort", "reward")
    change(page, "order", "down")
    assert names(page)[0] == "Episode 4"
    change(page, "use", "rejected")
    assert names(page) == ["Episode 2"]
    page.locator("summary:has-text('Filters')").click()
    page.locator("text=Clear filters").click()
    assert len(names(page)) == 5
    change(page, "oldest", "8")
    assert names(page) == ["Episode 3"]
    change(page, "oldest", "0")
    change(page, "min", "0.1")
    change(page, "max", "0.2")
    assert names(page) == ["Episode 2", "Group 7 · sample 1"]
    change(page, "stop", "length")
    assert names(page) == ["Group 7 · sample 1"]


def test_colours_follow_the_values(visit):
    page = visit("#color=none")
    shades = "tokens => tokens.map(token => token.style.backgroundColor)"
    tokens = page.locator(".token")
    assert tokens.evaluate_all(shades) == [""] * 4
    page.keyboard.press("c")  # log-probability
    page.wait_for_selector("#legend:has-text('nats')")
    first, second, *_, last = tokens.evaluate_all(shades)
    assert first == "transparent"
    assert second != last


def test_a_token_tells_its_values(visit):
    page = visit()
    page.locator(".token").nth(2).hover()
    told = page.locator("#tip").inner_text().split("\n")
    assert told[0] == "·attic"
    assert "-0.02 nats" in told
    page.locator(".token").first.hover()
    assert "none" in page.locator("#tip").inner_text()


def test_tokens_are_reached_by_keys(visit):
    page = visit()
    page.wait_for_selector(".token")
    page.locator(".reply").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == " the"
    assert page.locator("#tip").is_visible()


@pytest.mark.parametrize(
    ("address", "strongest"),
    [
        ("#episode=0", "."),  # the least likely one
        ("#episode=3&color=version", "And"),
        ("#episode=3&color=version&view=tree", "And"),
        ("#episode=4", None),  # without tokens
    ],
)
def test_the_token_with_the_strongest_colour_is_reached_by_a_key(visit, address, strongest):
    page = visit(address)
    page.keyboard.press("m")
    if strongest is None:
        assert page.evaluate("document.activeElement.matches('.token')") is False
    else:
        page.wait_for_function(f"document.activeElement.textContent === {strongest!r}")
        assert page.locator("#tip").is_visible()


def test_an_address_is_restored(visit):
    address = "#episode=3&turn=2&color=version&sort=reward&order=down&search=the&min=0.1"
    page = visit(address)
    page.wait_for_selector("#found:has-text('hits in')")
    assert page.locator("[name=color]").input_value() == "version"
    assert page.locator("[name=min]").input_value() == "0.1"
    assert page.locator("h2:has-text('Episode 3')").is_visible()
    page.keyboard.press("t")
    page.wait_for_selector(".branch")
    page.go_back()
    page.wait_for_selector(".turn")
    assert "episode=3" in page.url
    page.go_forward()
    page.wait_for_selector(".branch")


@pytest.mark.parametrize(("name", "number"), [("best", 4), ("worst", 0)])
def test_other_pages_may_link_to_the_best_and_the_worst(visit, name, number):
    page = visit(f"#episode={name}")
    assert page.locator(f"h2:has-text('Episode {number}')").is_visible()


def test_keys_step_open_and_close(visit):
    page = visit()
    page.keyboard.press("j")
    page.wait_for_selector("h2:has-text('Episode 1')")
    page.keyboard.press("k")
    page.wait_for_selector("h2:has-text('Episode 0')")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    background = "getComputedStyle(document.body).backgroundColor"
    page.keyboard.press("d")
    light = page.evaluate(background)
    page.keyboard.press("d")
    assert page.evaluate(background) != light


def test_a_group_marks_the_first_token_that_differs(visit):
    page = visit()
    page.keyboard.press("g")
    page.wait_for_selector(".column >> nth=1 >> .token")
    assert page.locator(".column strong").all_inner_texts() == ["0.10", "0.00"]
    assert page.locator(".parting").all_inner_texts() == [" cellar", " attic"]
    assert page.locator(".common").all_inner_texts() == ["In", " the"] * 2


def test_forks_become_a_tree(visit):
    page = visit("#episode=3&view=tree")
    assert page.locator(".branch strong").all_inner_texts() == ["Turn 0", "Turn 2", "Turn 1"]
    page.locator(".branch", has_text="helper").click()
    page.wait_for_selector("h3:has-text('starts anew')")
    assert "turn=1" in page.url


def test_tool_calls_images_and_markup(visit):
    page = visit("#episode=3")
    assert page.locator(".call").inner_text().startswith("add\n{")
    page = visit("#episode=4")
    page.locator("img").evaluate("image => image.decode()")  # raises where it is no image
    page = visit("#episode=2")
    assert page.locator(".token").all_inner_texts() == ["<script>alert(1)</script>", "</script>"]


def test_on_a_narrow_window_the_list_opens(visit):
    page = visit(width=700)
    assert not page.locator("#list").is_visible()
    page.locator("#open-list").click()
    page.locator(".row", has_text="Episode 3").click()
    page.wait_for_selector("h2:has-text('Episode 3')")
    assert not page.locator("#list").is_visible()


def test_a_large_report_keeps_few_nodes(visit):
    pieces = [" word", ",", " and", " more", "\n"] * 80
    turns = [turn(number, "Go on. " * 50, pieces) for number in range(10)]
    large = [episode(number, turns, group=number // 8, sample=number % 8) for number in range(64)]
    page = visit(of=filled(large))
    page.wait_for_selector(".token")
    most = 0
    for key in ["End", "PageUp", "g", "Escape"]:
        page.keyboard.press(key)
        page.wait_for_timeout(200)
        most = max(most, page.evaluate(COUNT_NODES))
    for place in [0, 1500, 3000]:
        page.locator("#page").evaluate("(columns, place) => columns.scrollTo(place, place)", place)
        page.wait_for_timeout(200)
        most = max(most, page.evaluate(COUNT_NODES))
    assert 2000 < most < 5000
