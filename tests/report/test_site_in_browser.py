"""The site, opened from disk in a browser: rules of axe-core, search, and no request to another address."""

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser
PAGES = [
    *("index.html", "start.html", "gallery.html", "following-training.html", "findings/VANISHING.html"),
    *("reference.html", "mathematics.html"),
]
VIEWS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 800}},
    "dark phone": {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"},
}


@pytest.fixture
def page_opener(browser, site):
    """Return a function that opens a page of the site from disk and returns it with the list of its requests."""
    contexts = []

    def open_page(name, **options):
        contexts.append(browser.new_context(**options))
        requests, sheet = [], contexts[-1].new_page()
        sheet.on("request", lambda request: requests.append(request.url))
        sheet.goto((site / name).as_uri())
        return sheet, requests

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_violations_and_asks_nobody_else(page_opener, name, view):
    sheet, requests = page_opener(name, **VIEWS[view])
    violations = Axe().run(sheet).response["violations"]
    messages = [
        f"{rule['id']}: {node['html'][:150]}: {node['failureSummary']}" for rule in violations for node in rule["nodes"]
    ]
    assert messages == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    assert sheet.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_search_works_from_disk(page_opener):
    sheet, requests = page_opener("index.html")
    sheet.focus(".md-search__input")
    sheet.get_by_text("Type to start searching").wait_for(state="attached")  # shown when the index is ready
    sheet.locator(".md-search__input").press_sequentially("vanishing gradient")
    sheet.wait_for_selector(".md-search-result__item a")
    assert sheet.locator(".md-search-result__item a").count() > 3
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
