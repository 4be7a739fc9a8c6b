"""An open page of a report in headless Chromium, for tests."""

import shutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip


class Tab:
    """A tab of headless Chromium, without a network, in which pages are opened one after the other.

    All pages have the same address: a browser compiles a script of an address only once. So a page opens in a quarter
    of the time.

    Args:
        browser: a browser of playwright.
        folder: an empty folder, for a link to the folder of the open page.
    """

    def __init__(self, browser, folder):
        self.page = browser.new_context(offline=True).new_page()
        self._link = folder / "open"

    def open(self, path, state="", width=1600, height=1000):
        """Open a page. `state` is the part of its address after the #."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.mouse.move(0, 0)
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(path.parent)
        self.page.goto(f"file://{self._link / path.name}" + (f"#{state}" if state else ""))
        self.page.wait_for_selector("#tradeoff .main-svg")

    def close(self):
        """Close the page, and with it all that a test has done there."""
        self.page.goto("about:blank")


class PageView:
    """An open page, with the messages of its console and the addresses that it requested.

    The arguments are those of `Tab.open`.
    """

    def __init__(self, tab, path, **more):
        self._tab, self.page = tab, tab.page
        self.messages = []
        self.requests = []
        self._listeners = {
            "console": lambda message: self.messages.append((message.type, message.text)),
            "pageerror": lambda error: self.messages.append(("error", str(error))),
            "dialog": lambda dialog: (self.messages.append(("dialog", dialog.message)), dialog.dismiss()),
            "request": lambda request: self._requested(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)
        tab.open(path, **more)

    def _requested(self, url):
        if not url.startswith(("file:", "data:", "blob:")):
            self.requests.append(url)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self._tab.close()
        if exception == (None, None, None):
            assert self.messages == []
            assert self.requests == []

    def frame(self):
        """Wait until the page has been drawn after an event."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def best(self):
        """Return the index of the group that the page calls the best, or None."""
        value = self.page.get_attribute("#answer", "data-best")
        return int(value) if value else None

    def front(self):
        """Return the indices of the groups on the Pareto front."""
        value = self.page.get_attribute("#front", "data-front")
        return sorted(int(index) for index in value.split(",")) if value else []

    def objective(self, name):
        """Choose an objective."""
        self.page.select_option("#objective", name)

    def filter(self, name, value):
        """Choose a value of a filter, or undo this."""
        self.page.click(f"#filters [data-filter={name}] .chip:has([value='{value}'])")

    def rows(self):
        """Return the indices of the groups in the table, from top to bottom."""
        return [
            int(value)
            for value in self.page.eval_on_selector_all("#runs tbody tr", "rows => rows.map((row) => row.dataset.run)")
        ]

    def column(self, name):
        """Return the texts of a column of the table of all runs, from top to bottom."""
        heads = [text.rstrip(" ↑↓") for text in self.page.locator("#runs thead th").all_inner_texts()]
        cells = "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        return [row[heads.index(name)] for row in self.page.eval_on_selector_all("#runs tbody tr", cells)]
