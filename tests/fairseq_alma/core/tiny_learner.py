"""A learner so small that every number of its ledger can be worked out by hand, and a run of it.

Its model is the set of numbers that it was trained on. Mega-batch t holds the number t; the test set holds
1..7, and the perplexity is 1 + how many of them the model has not met: 8 untrained, 1 after everything.
"""

import json
import os
import sys
import time
from pathlib import Path

from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Scores, Spent
from fairseq_alma.core.protocol import StreamSettings, run_stream
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.seed_record import SeedRecord
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream


class TinyLearner:
    """Trains on numbers: 100 FLOPs and one update for each. Grows by 10 parameters.

    Args:
        calls: gets (what, stage) for every call, across learners that share it.
    """

    def __init__(self, calls=None, replay=False):
        self.numbers = []
        self.num_params = 10
        self.stages = []
        self.calls = calls if calls is not None else []
        self._replay = replay

    def grow(self, stage):
        self.calls.append(("grow", stage.index))
        self.num_params += 10
        return [Spent(validation_flops=7)]

    def train(self, stage):
        self.calls.append(("train", stage.index))
        self.stages.append(stage)
        seen = [m.data for m in (stage.past + stage.new if self._replay else stage.new)]
        self.numbers += seen
        return [Spent(100 * len(seen), len(seen), train_seconds=time.perf_counter())]  # a clock: never twice the same

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.json").write_text(json.dumps({"numbers": self.numbers, "num_params": self.num_params}))

    def load(self, folder):
        vars(self).update(json.loads((folder / "model.json").read_text()))


class TestSet:
    """What no learner may hold."""

    __test__ = False
    numbers = frozenset(range(1, 8))


class TinyEvaluator:
    def __init__(self, calls=None):
        self.test_set = TestSet()
        self.calls = calls if calls is not None else []

    def __call__(self, learner):
        self.calls.append(("evaluate", sorted(learner.numbers)))
        perplexity = 1.0 + len(self.test_set.numbers - set(learner.numbers))
        return [Scores(learner.num_params, forward_flops=3, perplexity=perplexity, validation_perplexity=perplexity)]


def tiny_stream(num_mega_batches):
    return MegaBatchStream([MegaBatch(t, f"digest of {t}", data=t) for t in range(1, num_mega_batches + 1)])


def tiny_run(folder, num_mega_batches=4, wait=3, replay=False, learner=None, evaluate=None, prequential=None,
             last_group="train", complete=None, num_known=0, skip=()):  # fmt: skip
    """Run, or run what is left: a new process would do the same. Returns the rows."""
    stream = tiny_stream(num_mega_batches)
    record = RunRecord([SeedRecord(folder, {"wait": wait, "replay": replay, "seed": 5}, stream.digests)])
    settings = StreamSettings(num_mega_batches, wait, replay, last_group, skip, num_known)
    evaluate = evaluate or TinyEvaluator()
    (rows,) = run_stream(stream, learner or TinyLearner(), evaluate, settings, record, prequential, complete)
    return rows


def ledger_without_seconds(folder):
    """The ledger's lines without what may differ between equal runs."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [json.dumps({key: v for key, v in row.items() if not key.endswith("_seconds")}) for row in rows]


class _SleepingLearner(TinyLearner):
    def train(self, stage):
        if stage.index == 2:
            print("in stage 2", os.getpid(), flush=True)
            time.sleep(60)
        return super().train(stage)


if __name__ == "__main__":  # a run that holds its lease and sleeps in stage 2, to be killed there
    with Lease(sys.argv[1]):
        tiny_run(Path(sys.argv[1]), learner=_SleepingLearner())
