"""The page in a real browser: alone, quiet, and readable on a phone and in the dark."""

import os
import re
import shutil

import pytest

import sweep_rows as sr
from coec.experiments.reporting.report import write_report

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    script = {"error": "<script>throw 1</script>", "status": "failed"}
    rows = [*sr.sweep(), sr.row("wt2-llama", 0.4, "flap", "bias", grids=["main"]) | script]
    return write_report(sr.write(folder, rows)).files[3]


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("needs Debian's chromium on the PATH (with CI set this would be a failure)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser, page_file):
    """Opens the page under a size and a scheme; afterwards nothing may have gone wrong in it."""
    problems, requests, contexts = [], [], []

    def opened(size, scheme="light"):
        context = browser.new_context(viewport=size, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
    assert {url for url in requests if not url.startswith("data:")} == {page_file.as_uri()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_nothing_sticks_out_and_something_is_drawn(size, scheme, visit):
    page = visit(size, scheme)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= size["width"]
    assert page.locator("img").count() > 5
    assert page.locator("img").first.bounding_box()["height"] > 150
    assert len(page.screenshot()) > 20_000


def channels(colour):
    return [int(value) for value in re.findall(r"\d+", colour)[:3]]


def contrast(one, other):
    """The contrast ratio of WCAG 2."""

    def luminance(colour):
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in (value / 255 for value in channels(colour))
        ]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_dark_scheme_has_other_colours_and_contrast(visit):
    style = "getComputedStyle(document.body)"
    grounds = []
    for scheme in ("light", "dark"):
        page = visit(DESKTOP, scheme)
        page.evaluate("document.body.style.backgroundColor = 'Canvas'")
        grounds.append(page.evaluate(f"{style}.backgroundColor"))
        assert contrast(grounds[-1], page.evaluate(f"{style}.color")) > 7
    assert grounds[0] != grounds[1]


@pytest.mark.slow
def test_results_are_escaped(page_file):
    text = page_file.read_text(encoding="utf-8")
    assert "&lt;script&gt;throw 1" in text
    assert text.count("<script") == 0
    assert not re.search(r'(src|href)="(?!#|data:)', text)
