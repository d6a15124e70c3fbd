"""The page in a real browser: alone, quiet, sortable, and readable on a phone and in the dark."""

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
    return write_report(sr.write(folder, rows), compare="paper").files[2]


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
    assert page.locator(".panel svg").count() > 20
    assert page.locator(".panel svg").first.bounding_box()["height"] > 150
    assert len(page.screenshot()) > 20_000


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_table_that_goes_on_says_so_and_keeps_its_labels_in_sight(size, visit):
    page = visit(size)
    states = page.evaluate("""() => [...document.querySelectorAll(".scroll")].map((box) => {
      const frame = box.parentElement, hint = frame.querySelector(".hint");
      const shown = () => frame.classList.contains("more") && hint.offsetHeight > 0;
      const beyond = box.scrollWidth > box.clientWidth + 1, before = shown();
      box.scrollLeft = box.scrollWidth;
      box.dispatchEvent(new Event("scroll"));
      const first = box.querySelector("tbody th").getBoundingClientRect();
      const left = box.getBoundingClientRect().left;
      return { beyond, before, after: shown(), gap: first.left - left,
               share: first.width / box.clientWidth };
    })""")
    assert any(state["beyond"] for state in states) == (size == PHONE) or size == DESKTOP
    for state in states:
        assert state["before"] == state["beyond"]
        assert not state["after"]
        assert 0 <= state["gap"] <= 2
        assert state["share"] <= 0.6 or not state["beyond"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_figures_are_large_enough_to_read_and_nothing_of_them_is_cut(size, visit):
    page = visit(size)
    found = page.evaluate("""() => [...document.querySelectorAll("figure")].map((figure) => ({
      texts: [...figure.querySelectorAll(".panel svg text")].map((text) => {
        const box = text.getBoundingClientRect();
        const svg = text.ownerSVGElement.getBoundingClientRect();
        const matrix = text.getCTM(), scale = Math.hypot(matrix.a, matrix.b);
        return { size: parseFloat(getComputedStyle(text).fontSize) * scale,
                 inside: box.left >= svg.left - 1 && box.right <= svg.right + 1 };
      }),
      widths: [...figure.querySelectorAll(".panel")].map((p) => p.getBoundingClientRect().width),
    }))""")
    assert found
    for figure in found:
        assert min(text["size"] for text in figure["texts"]) >= 10.5
        assert all(text["inside"] for text in figure["texts"])
        assert min(figure["widths"]) >= (440 if size == DESKTOP else 340)


def test_no_column_is_empty_and_no_sentence_of_a_section_is_said_twice(visit):
    page = visit(DESKTOP)
    empty = page.evaluate("""() => [...document.querySelectorAll("table")].flatMap((table) =>
      [...table.tHead.rows[0].cells].filter((_, column) => [...table.tBodies[0].rows].every(
        (row) => row.cells[column].innerText.trim() === "–")).map((head) => head.innerText))""")
    assert empty == []
    for section in page.locator("section").all():
        said = section.locator("p:not(.hint), .notes li").all_inner_texts()
        sentences = [
            text for text in said if not re.match(r"[a-z][\w.-]*: |Settings [0-9]+$", text)
        ]
        assert len(sentences) == len(set(sentences))


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


STYLES = """(selector) => {
  const style = getComputedStyle(document.querySelector(selector));
  return [style.color, style.fill, style.stroke];
}"""


def test_the_dark_scheme_has_other_colours_and_contrast(visit):
    grounds, inks = [], []
    for scheme in ("light", "dark"):
        page = visit(DESKTOP, scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        inks.append(page.evaluate(STYLES, "body")[0])
        card = page.evaluate("getComputedStyle(document.querySelector('.scroll')).backgroundColor")
        assert contrast(grounds[-1], inks[-1]) > 7
        for selector in (".settings", "nav a", "sup", "dt"):
            assert contrast(grounds[-1], page.evaluate(STYLES, selector)[0]) > 4.5, selector
        assert contrast(card, page.evaluate(STYLES, ".panel svg text")[1]) > 7
        for role in ("coec", "rcpu", "none", "bias", "mean", "muted"):
            stroke = page.evaluate(STYLES, f"svg [style*='stroke: var(--plot-{role})']")[2]
            assert contrast(card, stroke) > 3, role
    assert grounds[0] != grounds[1]
    assert inks[0] != inks[1]


def column(table, index):
    return table.locator(f"tbody tr > :nth-child({index + 1})").all_inner_texts()


def test_a_click_on_a_head_sorts_and_the_third_restores(visit):
    page = visit(DESKTOP)
    table = page.locator("#best-results table")
    head = table.locator("thead th").nth(4)
    before = column(table, 4)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(table, 4) == sorted(before, key=float)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert column(table, 4) == sorted(before, key=float, reverse=True)
    table.locator("thead th button").nth(0).click()
    assert head.get_attribute("aria-sort") == "none"
    assert column(table, 0) == sorted(column(table, 0))
    for _ in range(2):
        table.locator("thead th button").nth(0).click()
    assert column(table, 4) == before


def test_what_was_not_measured_sorts_to_the_end(visit):
    page = visit(DESKTOP)
    table = page.locator("#main table").filter(has_text="failed").first
    head = table.locator("thead th button").filter(has_text="stories260K")
    for _ in range(2):
        head.click()
        assert column(table, 2)[-1].startswith("failed")


def test_every_link_of_the_contents_leads_to_its_section(visit):
    page = visit(PHONE)
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1


def test_ids_are_unique_and_results_are_escaped(page_file):
    text = page_file.read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert "&lt;script&gt;throw 1" in text
    assert text.count("<script>") == 1
    assert not re.search(r'(src|href)="(?!#|data:)', text)
