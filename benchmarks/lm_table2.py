"""Run alma-lm on a model of the paper for 50 updates of random tokens, and project the time of the whole Table 2.

.venv/bin/python benchmarks/lm_table2.py                                      on the devices of this machine
.venv/bin/python benchmarks/lm_table2.py --arch switch_lm_base                the smaller model
.venv/bin/python benchmarks/lm_table2.py --write                              also written to benchmarks/lm_table2.md
.venv/bin/python benchmarks/lm_table2.py --updates 50 --sequences 4           smaller updates, e.g. on a CPU

The projection divides the training tokens of all rows of Table 2 by the measured tokens per second. It leaves out
evaluation, start-up, and the further members that several devices train at the same time.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from _common import ROOT, provenance, table, write_part
from _lm_stream import write_stream
from hydra import compose, initialize_config_dir

from fairseq_alma.app.command import setting_values
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.lm.run import CONFIGS, OTHER_KEYS
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.table2 import PRESETS

VOCABULARY = 50_264  # size of a fairseq dictionary for the 50,257 symbols of GPT-2, with special and padding symbols
MEGA_BATCHES = 4
"""Number of mega-batches in the paper's stream."""
PARTS = {
    "switch_lm_large on cpu": "benchmarks/lm_table2.py --updates 50 --sequences 4",
    "switch_lm_large on cuda": "benchmarks/lm_table2.py",
    "switch_lm_base on cuda": "benchmarks/lm_table2.py --arch switch_lm_base",
}
"""Part of the report -> the command that fills it, on a machine without and with a GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="switch_lm_large", help="model (default: switch_lm_large)")
    parser.add_argument("--updates", type=int, default=50, help="number of updates (default: 50)")
    parser.add_argument("--sequences", type=int, default=192, help="sequences in an update (default: the paper's 192)")
    parser.add_argument("--experts", type=int, default=4, help="experts in each mixture (default: 4)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_table2.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="lm_table2_") as scratch:
        tokens = options.updates * options.sequences * 512
        stream = write_stream(Path(scratch) / "stream", VOCABULARY, tokens=min(tokens, 10_000_000))
        run = Path(scratch) / "run"
        command = [
            str(Path(sys.executable).parent / "alma-lm"), f"stream={stream}", f"out={run}", "learner=sm", "wait=1",
            f"arch={options.arch}", f"experts={options.experts}", f"updates={options.updates}", "validations=1",
            f"sequences_per_update={options.sequences}",
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT)
        row = Ledger(run / "ledger.jsonl").rows()[-1]
        settings = json.loads((run / "settings.json").read_text())
        log = (run / "stages/stage_001/member_1/log.txt").read_text()
    seconds = row.spent.train_seconds
    rate = options.updates * options.sequences * 512 / seconds
    rows = [
        ["tokens per second", f"{rate:,.0f}"],
        ["seconds an update", f"{seconds / options.updates:.2f}"],
        ["training TFLOP/s", f"{row.spent.train_flops / seconds / 1e12:.2f}"],
        ["precision", settings["precision"]],
        ["peak memory", _peak_memory(log)],
        ["training tokens of Table 2, billions", f"{tokens_of_table_2(options.arch) / 1e9:.0f}"],
        ["projected time of Table 2, days", f"{tokens_of_table_2(options.arch) / rate / 86400:,.1f}"],
    ]
    text = "\n".join([
        f"{options.updates} updates of {options.sequences} sequences of 512 random tokens, {options.arch}, "
        f"{options.experts} experts, by `alma-lm` as a whole. The seconds include one validation and the checkpoint.",
        "", *table(["", "measured"], rows), "", *provenance(load_at_start),
    ])  # fmt: skip
    print(text)
    if options.write:
        introduction = "# A stage of the paper's models\n\nWritten by `benchmarks/lm_table2.py --write`."
        device = "cuda" if torch.cuda.is_available() else "cpu"
        write_part(introduction, PARTS, f"{options.arch} on {device}", text.splitlines())


def tokens_of_table_2(arch: str) -> int:
    """Return the number of training tokens of all rows of Table 2 together."""
    return sum(_tokens_of_preset(preset, arch) for preset in PRESETS)


def _tokens_of_preset(preset: str, arch: str) -> int:
    with initialize_config_dir(str(CONFIGS.absolute()), version_base="1.1"):
        config = compose("alma_lm", ["stream=S", "out=O", f"preset={preset}", f"arch={arch}"])
    settings = LanguageModelSettings.from_mapping(setting_values(config, OTHER_KEYS), given=[])
    arrivals = settings.stream_settings(min(MEGA_BATCHES, settings.mega_batches or MEGA_BATCHES))
    stages = pairwise([0, *arrivals.arrivals_of_stages])
    updates = sum(settings.updates_of_stage(end - start) for start, end in stages)
    members = getattr(settings.learner_settings, "members", None) or 1
    return updates * members * settings.sequences_per_update * settings.tokens_per_sample


def _peak_memory(log: str) -> str:
    """Return the largest memory of the training: that of the GPU from the log, else that of the largest process."""
    free = [
        json.loads(line[line.index("{") :]).get("gb_free") for line in log.splitlines() if "| train_inner |" in line
    ]
    if any(free):
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        return f"{total - min(float(gigabytes) for gigabytes in free if gigabytes):.1f} GiB of {total:.0f} GiB"
    return f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.1f} GiB (process)"


if __name__ == "__main__":
    main()
