"""alma-report: every figure and table of the paper, and a page to decide by, from run folders.

alma-report runs/mnist --out report                   all runs at or below the folder
alma-report RUN RUN ... --out report --watch          again and again while runs go on; open report/index.html
tensorboard --logdir RUN                              the same numbers, live
"""

import argparse
import sys
import time
from pathlib import Path

from fairseq_alma.core.errors import AlmaError
from fairseq_alma.report.runs import Found, is_anyone_at_work, read_runs
from fairseq_alma.report.write import write_report

QUIET_ROUNDS = 3
"""Of --watch: after so many rounds without a run at work it ends. Between two runs of a sweep there may be one."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="alma-report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder of them at any depth")
    parser.add_argument("--out", required=True, type=Path, metavar="REPORT", help="folder of the report")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=30.0, metavar="SECONDS",
        help="make it again every so many seconds (30) while runs go on; the page reloads itself",
    )  # fmt: skip
    parser.add_argument("--page-only", action="store_true", help="only index.html: no figures, no tables")
    arguments = parser.parse_args()
    if arguments.watch is not None and not arguments.watch >= 1:
        parser.error(f"--watch {arguments.watch:g}: give at least 1 second")
    try:
        if arguments.watch is None:
            make(arguments.runs, arguments.out, page_only=arguments.page_only)
        else:
            watch(arguments.runs, arguments.out, arguments.watch, arguments.page_only)
    except AlmaError as error:
        sys.exit(_told(str(error)))
    except BrokenPipeError:  # its reader, `head` perhaps, has seen enough
        sys.stdout = None
    except OSError as error:
        sys.exit(_told(f"{error}: make room or give access, then run the same command"))
    except KeyboardInterrupt:
        sys.exit("alma-report: stopped")


def make(runs: list[str], out: Path, page_only: bool = False, reload_seconds: float | None = None) -> Found:
    """Read, write, say what was found."""
    began = time.monotonic()
    found = read_runs(runs)
    written = write_report(found, out, page_only, reload_seconds)
    for fault in found.faults:
        print(f"alma-report: left out: {fault}", file=sys.stderr)
    for note in found.notes:
        print(f"alma-report: {note}", file=sys.stderr)
    count = sum(len(comparison.runs) for comparison in found.comparisons)
    print(f"{count} runs in {len(found.comparisons)} comparison(s), {time.monotonic() - began:.1f} s")
    for comparison in found.comparisons:
        print(f"  {comparison.name}: {len(comparison.runs)} runs, {len(comparison.finished)} finished")
    print(f"{written} files; open {out / 'index.html'}", flush=True)
    return found


def watch(runs: list[str], out: Path, seconds: float, page_only: bool) -> None:
    """`make` until no run is at work any more. The last page does not reload itself."""
    quiet = 0
    while True:
        try:
            found = make(runs, out, page_only, reload_seconds=seconds)
            quiet = 0 if found.is_going_on else quiet + 1
        except AlmaError as error:
            print(f"alma-report: {error}", file=sys.stderr, flush=True)  # the first arrival may be to come
            quiet = 0 if is_anyone_at_work(runs) else quiet + 1
        if quiet >= QUIET_ROUNDS:
            break
        time.sleep(seconds)
    print("no run is at work: the last report")
    make(runs, out, page_only)


def _told(message: str) -> int:
    print(f"alma-report: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
