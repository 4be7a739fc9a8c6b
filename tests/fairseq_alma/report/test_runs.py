import gzip
import json
import os
import socket

import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.lease import Lease, is_held
from fairseq_alma.report.runs import label_of, read_runs
from tests.fairseq_alma.report.ledgers import write_text, write_vision

ERRORS = [0.9, 0.5, 0.4, 0.3, 0.2]


def only(found):
    [comparison] = found.comparisons
    return comparison


def test_seeds_of_one_setting_are_one_run_wherever_they_lie(tmp_path):
    write_vision(tmp_path / "a/seed_0", ERRORS, seed=0, out="a")
    write_vision(tmp_path / "a/seed_1", ERRORS, seed=1, out="a")
    write_vision(tmp_path / "elsewhere", ERRORS, seed=2, out="b", device="cuda", threads=8)
    [run] = only(read_runs([tmp_path])).runs
    assert [seed.seed for seed in run.seeds] == [0, 1, 2]
    assert run.folder == tmp_path
    assert run.is_finished and not run.is_running


def test_a_setting_that_the_learner_does_not_take_makes_no_other_run(tmp_path):
    write_vision(tmp_path / "a", ERRORS, seed=0, members=5, grow_every=3)
    write_vision(tmp_path / "b", ERRORS, seed=1, members=7, grow_every=1)
    assert len(only(read_runs([tmp_path])).runs) == 1


def test_the_same_seed_twice_is_another_run_and_the_same_folder_twice_is_not(tmp_path):
    write_vision(tmp_path / "a", ERRORS)
    write_vision(tmp_path / "b", ERRORS)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    comparison = only(read_runs([tmp_path / "a", tmp_path / "a", tmp_path / "link", tmp_path / "b"]))
    assert [label_of(run, comparison.varied) for run in comparison.runs] == ["SM", "SM, again (2)"]


def test_kinds_data_and_b_are_compared_apart(tmp_path):
    write_vision(tmp_path / "mnist", ERRORS)
    write_vision(tmp_path / "shorter", ERRORS[:4])
    write_vision(tmp_path / "digits", ERRORS, dataset="digits")
    write_vision(tmp_path / "first", ERRORS[:3], mega_batches=4, arrivals=2)
    write_vision(tmp_path / "v1", ERRORS, cer_from=0)
    write_text(tmp_path / "books", [900.0, 50.0, 40.0, 30.0, 20.0])
    write_text(tmp_path / "other books", [900.0, 50.0, 40.0, 30.0, 20.0], evaluated_on=["c", "d"])
    names = [comparison.name for comparison in read_runs([tmp_path]).comparisons]
    assert sorted(names) == [
        "books (2), B = 4", "books, B = 4", "digits, B = 4", "mnist, B = 3", "mnist, B = 4",
        "mnist, B = 4, CER from t = 0", "mnist, first 2 of B = 4",
    ]  # fmt: skip


def test_labels_say_what_differs_and_no_more(tmp_path):
    write_vision(tmp_path / "a", ERRORS, wait=1, width=4)
    write_vision(tmp_path / "b", ERRORS, wait=2, width=4, replay="all")
    write_vision(tmp_path / "c", ERRORS, learner="gmoe", grow_every=2, width=16)
    write_vision(tmp_path / "d", ERRORS, learner="gmoe", grow_every=4, width=16)
    comparison = only(read_runs([tmp_path]))
    assert [label_of(run, comparison.varied) for run in comparison.runs] == [
        "SM, wait 1, width 4", "SM, wait 2, replay, width 4", "gMoE, wait 1, width 16, grow_every 2",
        "gMoE, wait 1, width 16, grow_every 4",
    ]  # fmt: skip


def test_a_run_that_is_being_written_is_read_as_far_as_it_is_whole(tmp_path):
    folder = write_vision(tmp_path / "a", ERRORS[:3], mega_batches=4)
    with open(folder / "ledger.jsonl", "a") as file:
        file.write('{"t": 3, "stage": 3, "upd')
    with Lease(folder):
        assert is_held(folder)
        [run] = only(read_runs([tmp_path])).runs
        assert (run.last_t, run.num_arrivals, run.is_finished, run.is_running) == (2, 4, False, True)
    assert not only(read_runs([tmp_path])).runs[0].is_running


def test_the_lease_of_several_seeds_is_that_of_the_folder_above(tmp_path):
    write_vision(tmp_path / "a/seed_0", ERRORS[:3], mega_batches=4)
    with Lease(tmp_path / "a"):
        assert only(read_runs([tmp_path])).runs[0].is_running


def test_a_lease_whose_holder_is_gone_holds_nothing(tmp_path):
    gone = {"host": socket.gethostname(), "pid": 2**22 + 1, "process_start": "1"}
    (tmp_path / "lease.json").write_text(json.dumps(gone))
    assert not is_held(tmp_path)
    (tmp_path / "lease.json").write_text(json.dumps(gone | {"host": "another"}))
    assert is_held(tmp_path)
    os.utime(tmp_path / "lease.json", (1, 1))
    assert not is_held(tmp_path)


def test_the_number_of_arrivals_is_that_of_the_stream(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0], mega_batches=None, digests=["1", "2", "3"])
    [run] = only(read_runs([tmp_path])).runs
    assert (run.num_arrivals, run.last_t) == (3, 1)


def test_an_unfinished_seed_is_not_counted_beside_finished_ones(tmp_path):
    write_vision(tmp_path / "a", ERRORS, seed=0)
    write_vision(tmp_path / "b", ERRORS[:3], seed=1, mega_batches=4)
    [run] = only(read_runs([tmp_path])).runs
    assert [seed.seed for seed in run.counted] == [0]
    assert run.last_t == 4


def test_a_gzipped_ledger_is_read(tmp_path):
    folder = write_vision(tmp_path / "a", ERRORS)
    content = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").unlink()
    (folder / "ledger.jsonl.gz").write_bytes(gzip.compress(content))
    assert only(read_runs([tmp_path])).runs[0].mean("quality").tolist() == ERRORS
    (folder / "ledger.jsonl.gz").write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(RunError, match=r"ledger\.jsonl\.gz is damaged"):
        read_runs([tmp_path])


def damaged(folder, number, line):
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    lines[number - 1] = line
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"t": 2, "stage"', "line 3 is damaged"),
        ("[]", "line 3 is damaged"),
        ("\udce9", "line 3 is damaged"),
        ('{"t": 7, "stage": 1, "updated": true, "num_params": 1, "forward_flops": 1, "error_rate": 1}', "line 3 holds"),
        (
            '{"t": 2, "stage": 2, "updated": true, "num_params": 1, "forward_flops": 1, "error_rate": "low"}',
            "line 3: error_rate is 'low', a number was wanted",
        ),
        (
            '{"t": 2, "stage": 2, "updated": true, "num_params": 1, "forward_flops": 1, "perplexity": 5.0}',
            "line 3: error_rate is None, a number was wanted",
        ),
    ],
)
def test_a_damaged_line_leaves_the_run_out_and_is_named_with_its_file(tmp_path, line, told):
    write_vision(tmp_path / "good", ERRORS)
    bad = write_vision(tmp_path / "bad", ERRORS, wait=2)
    damaged(bad, 3, "X")
    content = (
        (bad / "ledger.jsonl").read_bytes().replace(b"\nX\n", b"\n" + line.encode(errors="surrogateescape") + b"\n")
    )
    (bad / "ledger.jsonl").write_bytes(content)
    found = read_runs([tmp_path])
    assert len(only(found).runs) == 1
    [fault] = found.faults
    assert fault.startswith(f"{bad / 'ledger.jsonl'}, {told}")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"stage": float("inf")}, "line 2 is damaged"),
        ({"num_params": float("nan")}, "line 2: num_params is no finite number"),
        ({"num_params": 10**400}, "num_params holds a number of hundreds of digits"),
        ({"expert_load": [0.5, 0.5]}, "line 2: expert_load holds 0.5, a list of numbers was wanted"),
        ({"expert_load": [["a"]]}, "line 2: expert_load holds ['a'], a list of numbers was wanted"),
    ],
)
def test_odd_values_leave_one_run_out_and_not_the_others(tmp_path, row, told):
    write_vision(tmp_path / "good", ERRORS)
    bad = write_vision(tmp_path / "bad", ERRORS, wait=1, width=8)
    lines = (bad / "ledger.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | row)
    (bad / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    found = read_runs([tmp_path])
    assert len(only(found).runs) == 1
    [fault] = found.faults
    assert str(bad / "ledger.jsonl") in fault and told in fault


def test_settings_of_odd_types_are_no_reason_to_stop(tmp_path):
    write_vision(tmp_path / "a", ERRORS, learner=["sm"])
    write_vision(tmp_path / "b", ERRORS, knob={"x": [1, {"y": 2}]})
    write_vision(tmp_path / "c", ERRORS, knob=[1], dataset="d" * 300)
    write_vision(tmp_path / "d", ERRORS, dataset="emnist", split=["a"])
    found = read_runs([tmp_path])
    assert ["learner is ['sm'], a name was wanted" in fault for fault in found.faults] == [True]
    assert len(found.comparisons) == 3
    assert all(len(comparison.slug) < 100 for comparison in found.comparisons)


def test_what_a_report_can_do_without_may_be_damaged(tmp_path):
    folder = write_vision(tmp_path / "a", ERRORS, wall_seconds=float("nan"))
    (folder / "provenance.json").write_text("{")
    [run] = only(read_runs([tmp_path])).runs
    assert run.command == []
    assert "wall_seconds" not in run.seeds[0].summary


def test_a_setting_that_an_older_release_did_not_have_parts_no_seeds_and_no_pairs(tmp_path):
    write_vision(tmp_path / "a", ERRORS, seed=0)
    write_vision(tmp_path / "b", ERRORS, seed=1, nesterov=False)
    write_vision(tmp_path / "c", ERRORS, seed=0, nesterov=False, wait=2)
    comparison = only(read_runs([tmp_path]))
    assert [[seed.seed for seed in run.seeds] for run in comparison.runs] == [[0, 1], [0]]
    assert comparison.runs[0].settings == comparison.runs[1].settings | {"wait": 1}


def test_the_first_arrivals_of_a_larger_b_are_compared_apart(tmp_path):
    write_vision(tmp_path / "a", ERRORS[:3], mega_batches=None, arrivals=2)
    write_vision(tmp_path / "b", ERRORS[:3], mega_batches=2)
    assert [one.name for one in read_runs([tmp_path]).comparisons] == ["mnist, B = 2", "mnist, first 2 of B = 500"]


def test_no_two_streams_share_a_folder(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0], stream="/s/docs-2", evaluated_on=["a"])
    write_text(tmp_path / "b", [900.0, 50.0], stream="/s/docs_2", evaluated_on=["b"])
    assert sorted(one.slug for one in read_runs([tmp_path]).comparisons) == ["docs_2_B1", "docs_2_B1_2"]


def test_a_run_that_is_held_and_has_no_arrival_yet_goes_on(tmp_path):
    write_vision(tmp_path / "a", ERRORS)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/settings.json").write_text("{}")
    with Lease(tmp_path / "b"):
        assert read_runs([tmp_path]).is_going_on
    assert not read_runs([tmp_path]).is_going_on


def test_damaged_settings_are_told(tmp_path):
    write_vision(tmp_path / "good", ERRORS)
    for name, content in (("b", "{"), ("c", "[1]"), ("d", "\x00")):
        (write_vision(tmp_path / name, ERRORS) / "settings.json").write_text(content)
    faults = read_runs([tmp_path]).faults
    assert [str(tmp_path / name / "settings.json") in fault for name, fault in zip("bcd", faults, strict=True)] == [
        True
    ] * 3


def test_nothing_to_report_on_says_why(tmp_path):
    with pytest.raises(RunError, match=r"nowhere is no folder: give run folders"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty holds no run: no settings\.json is at or below it"):
        read_runs([tmp_path / "empty"])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/settings.json").write_text("{}")
    with pytest.raises(RunError, match="begun has no arrival yet"):
        read_runs([tmp_path / "begun"])
    write_vision(tmp_path / "good", ERRORS)
    found = read_runs([tmp_path / "empty", tmp_path / "good"])
    assert "empty holds no run" in found.faults[0]
    assert len(only(found).runs) == 1


def test_learners_of_others_are_reported_too(tmp_path):
    write_vision(tmp_path / "a", ERRORS, learner="my_own", knob=3)
    write_vision(tmp_path / "b", ERRORS, learner="my_own", knob=4)
    comparison = only(read_runs([tmp_path]))
    assert [label_of(run, comparison.varied) for run in comparison.runs] == ["my_own, knob 3", "my_own, knob 4"]
