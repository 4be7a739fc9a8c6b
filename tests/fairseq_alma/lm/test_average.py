"""Language models: predictors that are averages, kept optimizer states, schedules over the stream, limited replay."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import AVERAGE, BEST, CONTINUATION, read_checkpoint
from fairseq_alma.core.averaging import AverageWeights
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.lm.average import Average
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.commands import RUN, run_command
from tests.fairseq_alma.killing import KilledRun, Reference, end_all, same_run

UPDATES = 6
SHORT = (*RUN, "dropout=0.1", "validations=3", f"updates={UPDATES}")
EMA = ("average=decay:0.8",)


def succeed(*command: object) -> None:
    result = run_command(*map(str, command))
    assert result.returncode == 0, result.stderr[-3000:]


def checkpoint(out: Path, k: int, name: str) -> dict:
    found = read_checkpoint(out / "stages" / f"stage_{k:03d}" / "member_1" / name)
    assert found is not None
    return found


def train_two_stages(stream: Path, out: Path, *settings: str, commands: tuple[int, ...] = (2,)) -> list[dict]:
    """Run two stages, and return the checkpoints from which the next stages continue.

    Each command runs the stages up to one of the given numbers.
    """
    for last in commands:
        succeed("alma-lm", f"stream={stream}", f"out={out}", *settings, f"mega_batches={last}")
    return [checkpoint(out, k, CONTINUATION) for k in (1, 2)]


def rates_in_log(out: Path, k: int) -> list[float]:
    """Return the learning rates that fairseq logged in a stage."""
    log = (out / "stages" / f"stage_{k:03d}" / "member_1" / "log.txt").read_text()
    lines = [line[line.index("{") :] for line in log.splitlines() if '"lr"' in line and "{" in line]
    return [float(json.loads(line)["lr"]) for line in lines]


def test_the_predictor_is_the_mean_of_the_models_after_each_update(stream, tmp_path):
    trained = train_two_stages(stream, tmp_path, *SHORT, "average=power:0", "replay=uniform")
    average = trained[1]["extra_state"][AVERAGE]
    assert average["count"] == 2 * UPDATES
    predictor, name = checkpoint(tmp_path, 2, BEST)["model"], "decoder.embed_tokens.weight"
    assert torch.equal(predictor[name], average["model"][name])
    assert not torch.equal(predictor[name], trained[1]["model"][name])
    assert "last_optimizer_state" not in checkpoint(tmp_path, 2, CONTINUATION)
    deployed = json.loads((tmp_path / "predictor.json").read_text())["checkpoints"]
    assert [entry["path"] for entry in deployed] == ["stages/stage_002/member_1/checkpoint_best.pt"]
    rows = Ledger(tmp_path / "ledger.jsonl").rows()
    counts = json.loads((stream / "stream.json").read_text())["splits"]
    tokens = [counts[f"mega_batch_{t}"]["tokens"] for t in (1, 2)]
    assert [row.scores.num_stored for row in rows] == [0, tokens[0], sum(tokens)]


def test_the_average_of_updates_and_the_state_of_the_optimizer_go_on(stream, tmp_path):
    more = (*EMA, "optimizer_state=keep", "schedule=constant", "replay=0.5")
    first, second = train_two_stages(stream, tmp_path, *SHORT, *more, commands=(1, 2))
    assert [one["extra_state"][AVERAGE]["count"] for one in (first, second)] == [UPDATES, 2 * UPDATES]
    steps = [{int(state["step"]) for state in one["last_optimizer_state"]["state"].values()} for one in (first, second)]
    assert steps == [{UPDATES}, {2 * UPDATES}]
    predictor = checkpoint(tmp_path, 2, BEST)
    assert AVERAGE not in predictor["extra_state"]
    average = second["extra_state"][AVERAGE]["model"]
    for name, weight in average.items():
        assert torch.equal(predictor["model"][name], weight)
    rates = [rates_in_log(tmp_path, k) for k in (1, 2)]
    assert rates[0][-1] == pytest.approx(0.005)
    assert rates[1] == pytest.approx([0.005] * len(rates[1]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "more",
    [
        (*EMA, "optimizer_state=keep", "schedule=constant", "replay=uniform"),
        ("optimizer_state=keep", "schedule=constant", "replay=uniform"),
        ("average=power:2", "learner=gmoe", "grow_experts=1", "replay=uniform"),
    ],
)
def test_a_killed_run_has_the_same_average(stream, tmp_path, more):
    settings = (*SHORT, "updates=12", "mega_batches=2", *more)
    try:
        reference = Reference.of(stream, tmp_path / "whole", settings)
        run = KilledRun(stream, tmp_path / "run", (*settings, "checkpoint_minutes=0.001"))
        run.kill_at_random(3, reference, random.Random(2))
        run.report()
        run.finish()
        same_run(run.out, reference.out)
    finally:
        end_all()


def test_a_tied_weight_is_averaged_once_and_saved_under_all_its_names():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(2, 2, bias=False)
            self.second = torch.nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

    model = Tied()
    average = Average(model, AverageWeights(), None)
    values = []
    for value in (2.0, 4.0, 9.0):
        model.first.weight.data.fill_(value)
        average.add()
        with average.used():
            values.append(float(model.second.weight[0, 0]))
        assert float(model.first.weight[0, 0]) == value
    assert values == pytest.approx([2.0, 3.0, 5.0])
    entry = average.entry({})
    assert entry["count"] == 3
    assert sorted(entry["model"]) == ["first.weight", "second.weight"]
    continued = Average(model, AverageWeights(), entry)
    continued.add()  # a fourth state, 9
    assert float(continued.entry({})["model"]["second.weight"][0, 0]) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learner": "gens", "optimizer_state": "keep"}, "cannot be used with learner=gens"),
        ({"learner": "gens", "from_scratch": True}, "from_scratch=true has no effect with learner=gens"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a finite number, and not negative"),
        ({"lr": 0.5, "weight_decay": 2.0}, "weight_decay=2.0 must be below 1 / lr = 2"),
        ({"from_scratch": True, "optimizer_state": "keep"}, "from_scratch=true starts each stage from new weights"),
        ({"average": "power:x"}, "average=power:x must be power:P"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        LanguageModelSettings(**{"stream": "s", "out": "o", "updates": 9, **settings})
