"""Show where the time of an update goes, before and after the fast path, and what it costs to make the model larger.

.venv/bin/python benchmarks/lm_profile.py                       on the CPU, printed, in about ten minutes
.venv/bin/python benchmarks/lm_profile.py --before FOLDER       beside an earlier version of ALMA, a checkout with .venv
.venv/bin/python benchmarks/lm_profile.py --device cuda --arch switch_lm_large
.venv/bin/python benchmarks/lm_profile.py --write               also written to benchmarks/lm_profile.md

An update is a forward and a backward pass, gradient clipping and Adam, without fairseq. On a CPU, the CPU time of one
thread is measured, on a GPU the time that passes. The variants of a table are measured in turn, each in a process.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _common import ROOT, provenance, table, write_part

SEQUENCES = {"cpu": 4, "cuda": 64}
"""Device -> number of sequences of 512 tokens in an update."""
PARTS = {
    f"{arch} on {device}": f"benchmarks/lm_profile.py --device {device} --arch {arch} --before FOLDER"
    for arch, device in (("switch_lm_base", "cpu"), ("switch_lm_base", "cuda"), ("switch_lm_large", "cuda"))
}
"""Part of the report -> the command that fills it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SEQUENCES, default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--arch", default="switch_lm_base", help="model (default: switch_lm_base)")
    parser.add_argument("--sequences", type=int, help=f"sequences in an update (default: {SEQUENCES})")
    parser.add_argument("--only-profile", action="store_true", help="leave out the table of larger and smaller models")
    parser.add_argument("--before", type=Path, help="checkout of an earlier version, which has its own .venv")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_profile.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    sequences = options.sequences or SEQUENCES[options.device]
    common = ["--device", options.device, "--arch", options.arch]
    text = "\n".join([
        *profiles(options.before, common, sequences), "",
        *([] if options.only_profile else [*scaling(common, sequences), ""]), *provenance(load_at_start),
    ])  # fmt: skip
    print(text)
    if options.write:
        introduction = "# Where the time of an update goes\n\nWritten by `benchmarks/lm_profile.py --write`."
        write_part(introduction, PARTS, f"{options.arch} on {options.device}", text.splitlines())


def run(*arguments: object, code: Path = ROOT) -> dict[str, dict[str, float]]:
    """Run _profile_step.py with the code and the Python of a checkout. Return what it prints."""
    own = code / ".venv/bin/python"
    python = str(own if own.exists() else sys.executable)
    program = [python, "-W", "ignore", str(ROOT / "benchmarks/_profile_step.py")]
    command = [*program, "--code", str(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=code)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def profiles(before: Path | None, common: list[str], sequences: int) -> list[str]:
    """Return the lines of the table that shows where the time goes."""
    variants = {"now, float32": (ROOT, "float32", "fused"), "now, bfloat16": (ROOT, "bfloat16", "fused")}
    if before:
        variants = {"before, float32": (before.absolute(), "float32", "fairseq"), **variants}
    found = {
        name: run(*common, "--sequences", sequences, "--precision", precision, "--optimizer", optimizer, code=code)
        for name, (code, precision, optimizer) in variants.items()
    }
    totals = {name: sum(one["seconds"].values()) for name, one in found.items()}
    rows = [["one update", *(f"**{total:.2f}**" for total in totals.values())]]
    for part in next(iter(found.values()))["seconds"]:
        rows.append([part, *(f"{one['seconds'][part]:.2f}" for one in found.values())])
    for kind in next(iter(found.values()))["kinds"]:
        # A profile makes an update slower. Report the share of each kind in the time without it.
        shares = [one["kinds"][kind] / sum(one["kinds"].values()) for one in found.values()]
        times = zip(shares, totals.values(), strict=True)
        rows.append([kind, *(f"{share * total:.2f} ({share:.0%})" for share, total in times)])
    return [
        f"{sequences} sequences of 512 tokens, 4 experts, dropless, 50,264 words. Seconds of one update, the smallest "
        "of three. The lower rows divide the update by kind of operation, from a profile of another update. Before, "
        "fairseq's Adam consisted of elementwise operations.",
        "",
        *table(["seconds", *found], rows),
    ]


def scaling(common: list[str], sequences: int) -> list[str]:
    """Return the lines of the table that shows the cost of an update against tokens, experts and layers."""
    variants: list[tuple[str, list[Any]]] = [
        *((f"{n * 512:,} tokens", ["--sequences", n]) for n in (sequences // 4, sequences // 2, sequences * 2)),
        *((f"{experts} experts", ["--experts", experts]) for experts in (8, 12, 64)),
        *((f"{layers} layers", ["--layers", layers]) for layers in (2, 12)),
    ]
    reference = run(*common, "--sequences", sequences)
    base = sum(reference["seconds"].values())
    parts = list(reference["seconds"])
    rows = [["the model above", *(f"{reference['seconds'][part]:.2f}" for part in parts), f"{base:.2f}", "1.00"]]
    for name, arguments in variants:
        more = [] if "--sequences" in arguments else ["--sequences", sequences]
        seconds = run(*common, *more, *arguments)["seconds"]
        total = sum(seconds.values())
        rows.append([name, *(f"{seconds[part]:.2f}" for part in parts), f"{total:.2f}", f"{total / base:.2f}"])
    return [
        "In bfloat16, with one size changed at a time. Experts that get few tokens cost little in the passes, but Adam "
        "updates all of them.",
        "",
        *table(["", *(f"{part}, s" for part in parts), "update, s", "of the model above"], rows),
    ]


if __name__ == "__main__":
    main()
