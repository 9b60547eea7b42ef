import os
import shutil

import pytest

from maxrl_fast.report import main
from tests.browser.made_up import write_run

ARGUMENTS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
ARGUMENTS += "--disable-component-update --disable-sync --disable-quic"


@pytest.fixture(scope="module")
def browser():
    # imported here, so that the tests can be collected without it
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=ARGUMENTS.split())
        yield browser
        browser.close()


@pytest.fixture
def show(tmp_path, browser):
    """Open the page of some runs. After the test, fail if the browser sent a message or a request
    for another file."""
    complaints, requests, contexts = [], [], []

    def open_page(*runs, **options):
        out = tmp_path / "report.html"
        assert main([*map(str, runs), "--out", str(out)]) == 0
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(out.as_uri())
        return page

    yield open_page
    own = (tmp_path / "report.html").as_uri()
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.partition("#")[0] for url in requests} == {own}


@pytest.fixture
def two(tmp_path):
    return {
        "one": write_run(tmp_path / "one", seed=1),
        "two": write_run(tmp_path / "two", seed=2, steps=20, objective="rloo", k=None),
    }
