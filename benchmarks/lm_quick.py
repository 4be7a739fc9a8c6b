"""Measure the speed of the language-model stream, in a few minutes on two cores.

.venv/bin/python benchmarks/lm_quick.py                     all parts, printed
.venv/bin/python benchmarks/lm_quick.py --write             also written to benchmarks/lm_quick.md
.venv/bin/python benchmarks/lm_quick.py --parts prep --repeats 5

The parts compare:
  prep    alma-prep with tokenizing to text and fairseq-preprocess
  start   the time to start a stage with a target of 10 seconds

Machines are noisy. Therefore the alternatives take turns, times are CPU times, and a ratio is shown twice: the ratio
of the two smallest times, and the median of the ratios of measurements that are neighbours in time. The median
decides whether a target is met. The exit status is 0 whether targets are met or not.
"""

import argparse
import os
import tempfile
from pathlib import Path

from _common import provenance
from _lm_prep import measure_prep
from _lm_start import measure_start

PARTS = {"prep": 3, "start": 5}
"""The names of the parts (c) and (d), and the default number of measurements of each part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)"
    )
    parser.add_argument("--repeats", type=int, help=f"number of measurements of each part (default: {PARTS})")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_quick.md (all parts)")
    options = parser.parse_args()
    if options.write and set(options.parts) != set(PARTS):
        parser.error("--write needs all parts: omit --parts")
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be at least 1")
    load_at_start = os.getloadavg()[0]
    sections = []
    with tempfile.TemporaryDirectory(prefix="lm_quick_") as scratch:
        for part in options.parts:
            repeats = options.repeats or PARTS[part]
            measure = measure_prep if part == "prep" else measure_start
            lines = measure(repeats, Path(scratch))
            print("\n".join([*lines, ""]), flush=True)
            sections.append("\n".join(lines))
    machine = "\n".join(provenance(load_at_start))
    print(machine)
    if options.write:
        title = "# Speed of the language-model stream\n\nWritten by `benchmarks/lm_quick.py --write`."
        how = (
            "Each ratio is shown twice: the ratio of the smallest CPU times, and the median of the ratios of "
            "measurements that are neighbours in time. The median decides PASS."
        )
        text = "\n\n".join([title, machine, how, *sections])
        Path(__file__).with_suffix(".md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
