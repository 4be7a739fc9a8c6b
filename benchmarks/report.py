"""Measure the time and the size of a report of many runs, and how fast its page responds.

.venv/bin/python benchmarks/report.py --write        some minutes; the measurements of the page need Chromium

Writes 1000 run folders of 500 arrivals in the format of alma-vision, with random numbers in their ledgers, and makes
a report of these runs. Opens the page of the report in headless Chromium and measures the time until the page is drawn,
and the time until a filter and a sort take effect. Compares the measurements with fixed targets, and the time
to read the ledgers with the time that json.loads alone needs. The exit status is 0 whether targets are met or not.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import ROOT, provenance, table, verdict

from fairseq_alma.report.reading import read_runs

LEARNERS = ("sm", "ens", "umix", "gens", "gmoe")
WAITS = (1, 2, 5, 10, 50)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS, MEGABYTES = 30, 15
"""Targets (largest values that pass): seconds for making the report, and size of its page in megabytes."""


def write_runs(folder: Path, num_runs: int, num_arrivals: int) -> None:
    """Write folders of invented runs with a grid of learners, waits, widths and epochs, and with random errors.

    The errors differ at every arrival, although real errors change only after a stage.
    """
    rng = random.Random(0)
    for number in range(num_runs):
        learner, wait = LEARNERS[number % 5], WAITS[number // 5 % 5]
        settings = {
            "dataset": "mnist", "learner": learner, "wait": wait, "width": 4 * (1 + number // 25 % 8),
            "epochs": 10 * (1 + number // 200), "replay": False, "mega_batches": num_arrivals, "seed": 0, "lr": 1.0,
        }  # fmt: skip
        run = folder / f"run_{number:04d}"
        run.mkdir(parents=True)
        (run / "settings.json").write_text(json.dumps(settings))
        source = {"command": ["alma-vision", f"learner={learner}"], "commit": "0"}
        (run / "provenance.json").write_text(json.dumps(source))
        lines, end = [], rng.uniform(0.02, 0.4)
        for t in range(num_arrivals + 1):
            stage = -(-t // wait) if t else 0
            row = {"t": t, "stage": stage, "updated": t > 0, "num_params": 1000 * (1 + number % 50),
                   "forward_flops": 9999, "num_members": 1,
                   "error_rate": round(end + 0.6 / (1 + t) + rng.uniform(0, 0.02), 4),
                   "train_flops": rng.randint(10**8, 10**10) if t else 0, "num_updates": 10, "train_seconds": 0.123,
                   "validation_flops": 12345}  # fmt: skip
            if t:
                row |= {"validation_loss": 0.5, "validation_error_rate": round(end + rng.uniform(0, 0.05), 4)}
            lines.append(json.dumps(row) + "\n")
        (run / "ledger.jsonl").write_text("".join(lines))


def time_page(path: Path) -> dict[str, float]:
    """Return the milliseconds until the page is drawn, and until the page shows the effect of each kind of user action.

    The milliseconds of a user action are a median of 11 measurements.
    """
    from playwright.sync_api import sync_playwright

    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    measured = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        start = time.monotonic()
        page.goto(f"file://{path}")
        page.wait_for_selector("#tradeoff .main-svg")
        measured["until it is drawn"] = 1000 * (time.monotonic() - start)
        for name, action in {
            "a sort of the table": "document.querySelectorAll('#runs th button')[step % 8].click()",
            "a filter": "document.querySelectorAll('.chip')[step % 5].click()",
        }.items():
            script = (
                "async (step) => { const t = performance.now(); "
                f"{action}; await {frame}; return performance.now() - t }}"
            )
            measured[name] = statistics.median(page.evaluate(script, step) for step in range(1, 12))
        browser.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="number of runs (default: 1000)")
    parser.add_argument("--arrivals", type=int, default=500, help="arrivals per run (default: 500)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/report.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_runs(folder / "runs", arguments.runs, arguments.arrivals)
        command = [sys.executable, "-W", "ignore", "-m", "fairseq_alma.report.cli", str(folder / "runs"), "--out"]
        times: dict[str, float] = {}
        options: dict[str, list[str]] = {"everything": [], "the page alone": ["--page-only"]}
        for name, more in options.items():
            start = time.monotonic()
            subprocess.run([*command, str(folder / "report"), *more], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            times[name] = time.monotonic() - start
        start = time.monotonic()
        read_runs([folder / "runs"])
        times["read"] = time.monotonic() - start
        start = time.monotonic()
        for path in sorted((folder / "runs").glob("*/ledger.jsonl")):
            for line in path.read_text().splitlines():
                json.loads(line)
        times["json"] = time.monotonic() - start
        megabytes = (folder / "report/index.html").stat().st_size / 1e6
        page = time_page(folder / "report/index.html") if CHROMIUM else {}
    whole, reading = times["everything"], times["read"] / times["json"]
    rows = [
        ["`alma-report`, figures, tables and page", f"{whole:.1f} s", _target(whole, SECONDS, "s")],
        ["`alma-report --page-only`", f"{times['the page alone']:.1f} s", ""],
        ["reading and checking the ledgers", f"{times['read']:.1f} s", ""],
        ["`json.loads` on each of their lines", f"{times['json']:.1f} s", f"reading takes {reading:.1f}x"],
        ["index.html", f"{megabytes:.1f} MB", _target(megabytes, MEGABYTES, "MB")],
    ]
    rows += [[f"the page: {name}", f"{milliseconds:.0f} ms", ""] for name, milliseconds in page.items()]
    text = "\n".join([
        "# alma-report", "", "Written by `benchmarks/report.py --write`.", "",
        f"{arguments.runs} runs of {arguments.arrivals} arrivals, wall time. The page is opened in headless Chromium"
        " without a GPU; its times are medians of 11, from the event to the second frame after it.", "",
        *table(["what", "measured", "target"], rows), "", *provenance(load), "",
    ])  # fmt: skip
    print(text)
    if arguments.write:
        Path(__file__).with_suffix(".md").write_text(text)


def _target(value: float, most: float, unit: str) -> str:
    """Return a text with the target (the largest value that passes) and whether the value meets it."""
    return f"under {most} {unit}: {verdict(value, most, at_most=True)}"


if __name__ == "__main__":
    main()
