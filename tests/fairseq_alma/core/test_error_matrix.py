"""Forgetting and transfer, worked out by hand, and the file from which they are computed."""

import json
import math

import pytest

from fairseq_alma.core.error_matrix import ErrorFile, ErrorMatrix, read_errors, transfer_metrics
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json
from tests.fairseq_alma.core.tiny_learner import TinyEvaluator, TinyLearner, tiny_run

NAN = math.nan


def matrix(accuracies, trained_at):
    """Return the matrix with these accuracies in percent."""
    return ErrorMatrix([[1 - value / 100 for value in row] for row in accuracies], [], None, trained_at)


def test_forgetting_and_transfer_with_wait_1():
    accuracies = [
        [10, 10, 20],  # untrained
        [80, 15, 20],
        [90, 70, 40],  # mega-batch 1 is best here, although it was trained before
        [60, 65, 75],
    ]
    assert transfer_metrics(matrix(accuracies, [1, 2, 3])) == pytest.approx({
        "forgetting": ((90 - 60) + (70 - 65)) / 2 / 100,
        "backward_transfer": ((60 - 80) + (65 - 70)) / 2 / 100,
        "forward_transfer": ((15 - 10) + (40 - 20)) / 2 / 100,
    })  # fmt: skip


def test_with_wait_2_the_mega_batches_of_a_stage_are_trained_at_its_last_arrival():
    accuracies = [
        [10, 10, 20, 20, 30],  # untrained
        [10, 10, 20, 20, 30],
        [80, 60, 25, 30, 30],  # stage 1, on mega-batches 1 and 2
        [80, 60, 25, 30, 30],
        [50, 70, 90, 80, 40],  # stage 2, on 3 and 4
        [40, 50, 60, 80, 95],  # stage 3, on 5, the end of the stream
    ]
    assert transfer_metrics(matrix(accuracies, [2, 2, 4, 4, 5])) == pytest.approx({
        "forgetting": ((80 - 40) + (70 - 50) + (90 - 60) + (80 - 80)) / 4 / 100,
        "backward_transfer": ((40 - 80) + (50 - 60) + (60 - 90) + (80 - 80)) / 4 / 100,
        "forward_transfer": ((25 - 20) + (30 - 20) + (40 - 30)) / 3 / 100,
    })  # fmt: skip


def test_one_stage_neither_forgets_nor_transfers():
    assert transfer_metrics(matrix([[10, 10], [10, 10], [90, 80]], [2, 2])) == {}


def test_a_mega_batch_whose_values_are_not_known_is_left_out():
    # Mega-batch 3 was added later: its untrained accuracy is not known.
    accuracies = [[10, 10, NAN], [80, 15, NAN], [70, 70, NAN], [60, 65, 75]]
    assert transfer_metrics(matrix(accuracies, [1, 2, 3])) == pytest.approx({
        "forgetting": ((80 - 60) + (70 - 65)) / 2 / 100,
        "backward_transfer": ((60 - 80) + (65 - 70)) / 2 / 100,
        "forward_transfer": (15 - 10) / 100,
    })  # fmt: skip


def test_rows_between_stages_repeat_and_short_rows_end_in_nan(tmp_path):
    file = ErrorFile(tmp_path)
    file.add(0, [0.5, 1.0], [None, 2 / 3], class_names=["cat", "dog"])
    file.add(1, [0.25, 0.75], [None, 0.0])
    file.add(2, [0.5, 0.5, 0.125], [None, 0.25])
    found = read_errors(tmp_path, stages=[0, 0, 1, 2])
    assert str(found.by_mega_batch) == "[[0.5, 1.0, nan], [0.5, 1.0, nan], [0.25, 0.75, nan], [0.5, 0.5, 0.125]]"
    assert str(found.by_class) == "[[nan, 0.666667], [nan, 0.666667], [nan, 0.0], [nan, 0.25]]"
    assert found.class_names == ["cat", "dog"]
    assert found.trained_at == [2, 2, 3]


def test_stages_that_were_trained_without_the_matrix_are_not_known(tmp_path):
    ErrorFile(tmp_path).add(2, [0.5, 0.5], [0.25])
    found = read_errors(tmp_path, stages=[0, 1, 2])
    assert str(found.by_mega_batch) == "[[nan, nan], [nan, nan], [0.5, 0.5]]"
    assert transfer_metrics(found) == {}
    assert read_errors(tmp_path / "other", stages=[0, 1, 2]) is None


def test_a_stage_that_is_written_again_replaces_its_line_and_what_follows(tmp_path):
    for rate in (0.5, 0.25):
        file = ErrorFile(tmp_path)
        file.add(0, [rate], [rate])
        file.add(1, [rate], [rate])
    assert [json.loads(line)["by_class"] for line in (tmp_path / "errors.jsonl").read_text().splitlines()] == [
        [0.25]
    ] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["errors.jsonl"]


@pytest.mark.parametrize("line", ["{", '{"stage": 0, "by_mega_batch": ["a"], "by_class": []}', '{"stage": 0}'])
def test_a_damaged_file_is_named(tmp_path, line):
    (tmp_path / "errors.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=r"errors\.jsonl.*(line 1 is damaged|stage 0: by_mega_batch is not a list)"):
        read_errors(tmp_path, [0])


def test_the_summary_of_a_finished_run_has_the_metrics(tmp_path):
    class WithMatrix(TinyEvaluator):
        """The tiny learner is right on the mega-batches that it has met, except the first when it has met three."""

        def __call__(self, learner):
            scores, met = super().__call__(learner), set(learner.numbers)
            wrong = [float(j not in met or (j == 1 and len(met) == 3)) for j in (1, 2, 3)]
            ErrorFile(tmp_path).add(len(learner.stages), wrong, [0.5])
            return scores

    tiny_run(tmp_path, num_mega_batches=3, wait=1, learner=TinyLearner(), evaluate=WithMatrix())
    found = read_json(tmp_path / "summary.json")
    assert (found["forgetting"], found["backward_transfer"], found["forward_transfer"]) == (0.5, -0.5, 0.0)
