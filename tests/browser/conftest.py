"""Set-up of the browser test: a browser, JupyterLab on a copy of the notebooks, a log, a picture of every failure."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")  # as Linux distributions name them
# As in `make test`: short runs of the packaged model, offline. One thread, which leaves a core to the browser.
ENVIRONMENT = {
    "MINFER_FAST": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JUPYTER_PLATFORM_DIRS": "1",
}
LOG = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--browser-log", type=Path, help="file for the log; pictures of failures are put beside it")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if path := config.stash.get(LOG, None):
        terminalreporter.write_line(f"The log of the browser test, with pictures of its failures beside it: {path}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report = yield
    page: Page | None = getattr(item, "funcargs", {}).get("page")
    if report.when == "call" and report.failed and page is not None and not page.is_closed():
        page.screenshot(path=item.config.stash[LOG].with_name(f"{item.name}.png"))
    return report


@pytest.fixture(scope="session")
def log(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    path = pytestconfig.getoption("--browser-log") or tmp_path_factory.getbasetemp() / "browser.log"
    path = pytestconfig.stash[LOG] = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    began = time.monotonic()

    def write(line: str) -> None:
        with path.open("a") as file:
            file.write(f"{time.monotonic() - began:6.1f} s  {line}\n")

    return write


@pytest.fixture(scope="session")
def browser(log: Callable[[str], None]) -> Iterator[Browser]:
    reason = "Playwright is not installed: `make test-browser` installs it."
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with playwright.sync_playwright() as driver:
        if found is None and not os.path.exists(driver.chromium.executable_path):
            pytest.skip("There is no Chromium: install one (on Debian: apt-get install chromium) to run this test.")
        browser = driver.chromium.launch(executable_path=found)
        log(f"Chromium {browser.version}")
        yield browser
        browser.close()


@pytest.fixture()
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_page(viewport={"width": 1400, "height": 1000}) as page:
        yield page


@pytest.fixture(scope="session")
def folder(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What JupyterLab serves: a copy of the notebooks, which changes as they run."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    return folder


@pytest.fixture(scope="session")
def address(folder: Path, log: Callable[[str], None]) -> Iterator[str]:
    from lab import server  # after `browser` had its chance to skip

    with server(folder, ENVIRONMENT) as address:
        yield address
    log(f"What the server said:\n{(folder / 'server.log').read_text()}")
