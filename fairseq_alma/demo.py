"""make demo: the main job on the embedded corpus, from raw text to a picture, by the commands a user would type."""

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from fairseq_alma.core.ledger import Ledger
from fairseq_alma.display import ledger_table, wide_console
from fairseq_alma.plots import plot_perplexity

MEGA_BATCHES = 4
UPDATES_PER_MEGA_BATCH = 90


def main() -> int:
    """Stream, SM at waits 1 and 4, ledger tables, one picture. A second call finds its work done."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--updates-per-mega-batch", type=int, default=UPDATES_PER_MEGA_BATCH)
    arguments = parser.parse_args()
    out = arguments.out
    stream = out / "stream"
    say = wide_console().print
    say(
        f"Real text, no download: the docstrings of Python's standard library arrive in {MEGA_BATCHES} mega-batches.\n"
        "SM is trained on each as it comes (wait 1), or on all of them at the end (wait 4): as many updates in all."
    )
    _command("alma-prep", str(stream), "--source", "python-docs", "--mega-batches", str(MEGA_BATCHES),
             "--vocab-size", "4000", "--valid-words", "10000", "--seed", "0")  # fmt: skip
    waits = {wait: out / "sm" / f"wait_{wait}" for wait in (1, MEGA_BATCHES)}
    for wait, run in waits.items():
        _command("alma-lm", f"stream={stream}", f"out={run}", "preset=quickstart", "learner=sm", f"wait={wait}",
                 f"updates_per_mega_batch={arguments.updates_per_mega_batch}")  # fmt: skip
    picture = plot_perplexity({f"SM, wait {wait}": run for wait, run in waits.items()}, out / "perplexity.png")
    for wait, run in waits.items():
        say(ledger_table(Ledger(run / "ledger.jsonl").rows(), title=f"SM, wait {wait}"))
    say(
        f"* untrained.\n"
        f"picture         {picture}\n"
        f"ledgers         {', '.join(str(run / 'ledger.jsonl') for run in waits.values())}\n"
        f"logs            {waits[1]}/stages/stage_001/member_1/log.txt ...\n"
        f"stream          {stream} (stream.json says what is in it)\n"
        f"score a model   .venv/bin/alma-eval {waits[1]}\n"
        f"the paper's own settings: README.md"
    )
    return 0


def _command(name: str, *arguments: str) -> None:
    """Print and run one of our commands. What it cannot do ends the demo with its own message."""
    print(f"\n$ {name} {shlex.join(arguments)}", flush=True)
    program = Path(sysconfig.get_path("scripts")) / name
    status = subprocess.run([str(program), *arguments], env={**os.environ, "COLUMNS": "120"}).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
