"""An open page of a report in headless Chromium, for tests."""

import shutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip


class PageView:
    """An open page, with the messages of its console and the addresses that it requested."""

    def __init__(self, browser, path, width=1600, height=1000):
        self.context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
        self.page = self.context.new_page()
        self.messages = []
        self.page.on("console", lambda message: self.messages.append((message.type, message.text)))
        self.page.on("pageerror", lambda error: self.messages.append(("error", str(error))))
        self.page.on("dialog", lambda dialog: (self.messages.append(("dialog", dialog.message)), dialog.dismiss()))
        self.page.on("request", lambda request: self._requested(request.url))
        self.requests = []
        self.page.goto(f"file://{path}")
        self.page.wait_for_selector("#tradeoff .main-svg")

    def _requested(self, url):
        if not url.startswith(("file:", "data:", "blob:")):
            self.requests.append(url)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.context.close()
        if exception == (None, None, None):
            assert self.messages == []
            assert self.requests == []

    def frame(self):
        """Wait until the page has been drawn after an event."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def best(self):
        """Return the index of the group that the page recommends, or None."""
        value = self.page.get_attribute("#answer", "data-best")
        return int(value) if value else None

    def front(self):
        """Return the indices of the groups on the Pareto front."""
        value = self.page.get_attribute("#front", "data-front")
        return sorted(int(index) for index in value.split(",")) if value else []

    def slide(self, name, step):
        """Move a slider to a step."""
        self.page.evaluate(
            "([name, step]) => { const input = document.getElementById(name); input.value = String(step);"
            " input.dispatchEvent(new Event('input')); }",
            [name, step],
        )
        self.frame()

    def rivals(self):
        """Return the indices of the groups that the page calls rivals of the best one."""
        value = self.page.get_attribute("#answer", "data-rivals")
        return [int(index) for index in value.split(",")] if value else []

    def objective(self, name):
        """Choose an objective."""
        self.page.check(f"#objectives input[value={name}]")
        self.frame()

    def answer_for(self, steps):
        """Move all sliders, and return the best group, its rivals, its label and the groups beyond the budget."""
        return self.page.evaluate(
            "async (steps) => {"
            " for (const [name, step] of Object.entries(steps)) { const input = document.getElementById(name);"
            " input.value = String(step); input.dispatchEvent(new Event('input')); }"
            " await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
            " const box = document.getElementById('answer');"
            " return { best: box.dataset.best, rivals: box.dataset.rivals,"
            " label: box.querySelector('.best')?.textContent,"
            " beyond: [...document.querySelectorAll('#runs tr.beyond')].map((row) => Number(row.dataset.run)) }; }",
            steps,
        )

    def rows(self):
        """Return the indices of the groups in the table, from top to bottom."""
        return [
            int(value)
            for value in self.page.eval_on_selector_all("#runs tbody tr", "rows => rows.map((row) => row.dataset.run)")
        ]

    def table(self, selector):
        """Return the rows of the body of a table: the text of each cell."""
        rows = f"{selector} tbody tr"
        return self.page.eval_on_selector_all(rows, "rows => rows.map((r) => [...r.cells].map((c) => c.textContent))")
