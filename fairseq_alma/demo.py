"""make demo: the main job on the embedded corpus, from raw text to a report, by the commands a user would type."""

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.ledger import Ledger

MEGA_BATCHES = 4
UPDATES_PER_MEGA_BATCH = 32


@dataclass(frozen=True)
class Part:
    """One learner of the demo."""

    label: str
    folder: str
    settings: tuple[str, ...]


PARTS = (
    Part("SM, wait 1", "sm/wait_1", ("learner=sm", "wait=1")),
    Part(f"SM, wait {MEGA_BATCHES}", f"sm/wait_{MEGA_BATCHES}", ("learner=sm", f"wait={MEGA_BATCHES}")),
    Part("gMoE, 4 to 12 experts", "gmoe", ("learner=gmoe", "wait=1", "experts=4", "grow_experts=[2,2,4]")),
    Part("Ens, 2 members", "ens", ("learner=ens", "wait=1", "members=2")),
)


def main() -> int:
    """Stream, learners, ledger tables, a report. A second call finds its work done."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--updates-per-mega-batch", type=int, default=UPDATES_PER_MEGA_BATCH)
    arguments = parser.parse_args()
    out = arguments.out
    stream = out / "stream"
    say = wide_console().print
    say(
        f"Real text, no download: the docstrings of Python's standard library arrive in {MEGA_BATCHES} mega-batches.\n"
        "One model (SM) is trained on each as it comes, or waits for all of them; a mixture (gMoE) gets more experts\n"
        "before each stage; two models (Ens) are trained side by side and vote. Each model sees as many updates."
    )
    _command("alma-prep", str(stream), "--source", "python-docs", "--mega-batches", str(MEGA_BATCHES),
             "--vocab-size", "4000", "--valid-words", "5000", "--seed", "0", "--duplicates", "keep")  # fmt: skip
    for part in PARTS:
        _command("alma-lm", f"stream={stream}", f"out={out / part.folder}", "preset=quickstart", *part.settings,
                 f"updates_per_mega_batch={arguments.updates_per_mega_batch}", "validations=2")  # fmt: skip
    runs = {part.label: out / part.folder for part in PARTS}
    _command("alma-report", *map(str, runs.values()), "--out", str(out / "report"))
    for label, run in runs.items():
        say(ledger_table(Ledger(run / "ledger.jsonl").rows(), title=label))
    first = next(iter(runs.values()))
    say(
        f"* untrained.\n"
        f"report          {out}/report/index.html: open it in a browser\n"
        f"figures         {out}/report/figures/\n"
        f"ledgers         {out}/.../ledger.jsonl\n"
        f"logs            {first}/stages/stage_001/member_1/log.txt ...\n"
        f"stream          {stream} (stream.json says what is in it)\n"
        f"score a model   .venv/bin/alma-eval {first}\n"
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
