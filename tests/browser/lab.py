"""JupyterLab on a copy of the notebooks, and a chapter in it, used as a reader uses it: with mouse and keyboard.

Invariant: what happens is done through the page; JupyterLab's own objects (`window.jupyterapp`) are only read, to know
what is done and what came of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Locator, Page

# Limits for a slow and busy machine, in seconds; nothing waits this long when all is well.
START_S, RUN_S, ACT_S = 180, 1200, 60

# All cells stay in the page, and no question about news covers it.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# The server keeps these in its own folder and reads none of the user's.
HOMES = {
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "IPYTHONDIR": "ipython",
}

# Errors in the browser's console that are not the chapters' fault: a pattern, and why.
HARMLESS: Mapping[str, str] = {}

CELL = ".jp-Notebook .jp-Cell"
CONTROLS = ".jp-OutputArea .noUi-handle, .jp-OutputArea .widget-dropdown select"
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
KERNEL_READY = f"{NOTEBOOK.replace('app.', 'app?.')}?.sessionContext?.session?.kernel?.status === 'idle'"
WATCH_KERNEL = f"""() => {{
    window.kernelStatuses = [];
    {NOTEBOOK}.sessionContext.statusChanged.connect((_, status) => window.kernelStatuses.push(status));
}}"""
KERNEL_DIED = "window.kernelStatuses.filter(status => /dead|restarting/.test(status))"
ALL_DONE = f"""{KERNEL_DIED}.length || {NOTEBOOK}.sessionContext.session.kernel.status === 'idle'
    && {NOTEBOOK}.content.widgets.every(cell => cell.model.executionState !== 'running')"""
CELLS = f"""{NOTEBOOK}.content.widgets.map(cell => ({{
    source: cell.model.sharedModel.source,
    code: cell.model.type === 'code',
    count: cell.model.executionCount ?? null,
    done: cell.model.executionState !== 'running',
    errors: (cell.model.outputs?.toJSON() ?? []).filter(output => output.output_type === 'error')
        .map(output => `${{output.ename}}: ${{output.evalue}}`),
}}))"""
BROKEN_IMAGES = """[...document.querySelectorAll('.jp-Notebook img')]
    .filter(image => !image.complete || !image.naturalWidth).map(image => image.src.slice(0, 80))"""
# What is in the pictures of a widget, wherever the browser keeps them.
PICTURES = """async cell => Promise.all([...cell.querySelectorAll('img.widget-image')].map(async image => {
    const sum = await crypto.subtle.digest('SHA-256', await (await fetch(image.src)).arrayBuffer());
    return [...new Uint8Array(sum)].join();
}))"""


@contextmanager
def server(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Serves `folder` with JupyterLab. Yields an address with `{name}` and `{path}` for a notebook.

    Each name is a workspace of its own, so that JupyterLab does not open again what was open before.
    """
    for name, values in SETTINGS.items():
        path = folder / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    homes = {name: str(folder / place) for name, place in HOMES.items()}
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ServerApp.ip=127.0.0.1"]
    with (folder / "server.log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"],
            cwd=folder,
            env=os.environ | homes | dict(env),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            told = _told(folder, process)
            yield f"{told['url']}lab/workspaces/{{name}}/tree/{{path}}?token={told['token']}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _told(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the server says about itself once it listens: its port is the first free one, its token a random one."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        for path in (folder / "runtime").glob("jpserver-*.json"):
            if text := path.read_text():  # empty while it is being written
                return json.loads(text)
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{(folder / 'server.log').read_text()}")


class Chapter:
    """A notebook in JupyterLab. `problems` says in words what went wrong so far, in the page and in the kernel.

    patience_s: how long a change may take before it counts as one that does not come.
    """

    def __init__(self, page: Page, name: str, log: Callable[[str], None], patience_s: float = ACT_S) -> None:
        self.page, self.name, self.patience_s = page, name, patience_s
        self.problems: list[str] = []
        self._log = log
        page.set_default_timeout(ACT_S * 1000)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problem(f"error in the page: {error}"))
        page.on("crash", lambda _: self.problem("the page crashed"))

    def log(self, text: str) -> None:
        self._log(f"{self.name}: {text}")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.log(f"PROBLEM: {text}")

    def _console(self, message: ConsoleMessage) -> None:
        text = f"{message.text} ({message.location.get('url')})"
        known = next((reason for pattern, reason in HARMLESS.items() if re.search(pattern, text)), None)
        if message.type == "error" and known is None:
            self.problem(f"error in the browser's console: {text}")
        elif message.type in ("error", "warning"):
            self.log(f"console, {message.type}: {text}" + (f" [harmless: {known}]" if known else ""))

    # -- what a reader does ---------------------------------------------------------------------------------------

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_function(KERNEL_READY, timeout=START_S * 1000)
        self.page.evaluate(WATCH_KERNEL)
        self.log("opened, the kernel is ready")

    def run_all(self) -> None:
        """Run All by the menu; every cell that does not get its number, or shows an error, is a problem."""
        began = time.monotonic()
        self._menu("Run", "Run All Cells")
        self.page.wait_for_function(ALL_DONE, timeout=RUN_S * 1000, polling=200)
        cells = self.page.evaluate(CELLS)
        code = [cell for cell in cells if cell["code"] and cell["source"].strip()]
        self.log(f"{len(code)} cells of code ran in {time.monotonic() - began:.1f} s")
        if died := self.page.evaluate(KERNEL_DIED):
            self.problem(f"the kernel died: {', '.join(died)}")
        if [cell["count"] for cell in code] != list(range(1, len(code) + 1)):
            self.problem("not every cell ran, in order")
        for number, cell in enumerate(cells, 1):
            for error in cell["errors"]:
                self.problem(f"cell {number} shows an error: {error}")
        for source in self.page.evaluate(BROKEN_IMAGES):
            self.problem(f"an image is broken: {source}")

    def rewrite(self, number: int, source: str) -> str:
        """Writes `source` over a cell, runs it, and gives the text that stands below it then."""
        cell = self.cell(number)
        before = self._state(number)["count"]
        cell.locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        if not self._until(lambda: self._state(number)["done"] and self._state(number)["count"] not in (None, before)):
            self.problem(f"cell {number + 1} does not come to its end")
        state = self._state(number)
        if state["source"] != source:
            self.problem(f"cell {number + 1} holds something else than what was typed")
        for error in state["errors"]:
            self.problem(f"cell {number + 1} shows an error: {error}")
        return self.text(number)

    def widgets(self, expected: bool) -> dict[int, list[Locator]]:
        """By cell, the sliders and menus below it, once the page has built them; `expected`: there has to be one."""
        counts: list[int] = []

        def built() -> bool:
            counts.append(self.page.locator(CONTROLS).count())
            return (counts[-1] > 0 or not expected) and counts[-10:] == [counts[-1]] * 10  # the same for a second

        self._until(built)
        cells = range(self.page.locator(CELL).count())
        return {number: found for number in cells if (found := self.cell(number).locator(CONTROLS).all())}

    def changes(self, number: int, what: str, act: Callable[[], object]) -> None:
        """Does `act`; that no picture of the cell changes by it is a problem."""
        before = self.pictures(number)
        began = time.monotonic()
        act()
        if self._until(lambda: self.pictures(number) != before):
            self.log(f"cell {number + 1}: {what} changes the picture in {time.monotonic() - began:.1f} s")
        else:
            self.problem(f"cell {number + 1}: {what} does not change the picture")

    # -- what a reader sees ---------------------------------------------------------------------------------------

    def cell(self, number: int) -> Locator:
        return self.page.locator(CELL).nth(number)

    def text(self, number: int) -> str:
        """What stands below a cell."""
        return self.cell(number).locator(".jp-OutputArea").first.inner_text()

    def pictures(self, number: int) -> list[str]:
        return self.cell(number).evaluate(PICTURES)

    def _state(self, number: int) -> dict[str, Any]:
        return self.page.evaluate(CELLS)[number]

    def _menu(self, *names: str) -> None:
        for name in names:
            self.page.get_by_role("menuitem", name=name, exact=True).click()

    def _until(self, holds: Callable[[], bool]) -> bool:
        """Waits until `holds` does; False if it does not within this chapter's patience."""
        until = time.monotonic() + self.patience_s
        while not holds():
            if time.monotonic() > until:
                return False
            self.page.wait_for_timeout(100)
        return True
