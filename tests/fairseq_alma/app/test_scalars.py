"""RUN/tensorboard, read back by TensorBoard itself."""

import errno
import threading
from pathlib import Path

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.record_writer import RecordWriter

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.core.ledger import Ledger, LedgerRow, Scores, Spent
from tests.vision.tiny_runs import small_run


def scalars_in(folder):
    """Name -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def vision_rows():
    untrained, trained = Scores(10, 2, error_rate=0.9), Scores(10, 2, error_rate=0.25, validation_error_rate=0.5)
    return [
        LedgerRow(0, 0, False, untrained),
        LedgerRow(1, 0, False, untrained),
        LedgerRow(2, 1, True, trained, Spent(4 * 10**12, 6, 1.5)),
        LedgerRow(3, 1, False, trained),
    ]


def test_what_changes_is_written_and_sums_count_every_arrival(tmp_path):
    scalars, rows = RunScalars(tmp_path), vision_rows()
    for count in range(1, 5):
        scalars.rows(rows[:count])
    scalars.close()
    found = scalars_in(tmp_path)
    assert found["test/error_rate"] == [(0, pytest.approx(0.9)), (2, 0.25), (3, 0.25)]
    assert found["stream/cer"] == [(2, pytest.approx(1.15)), (3, pytest.approx(1.4))]
    assert found["cost/train_tflops"] == [(0, 0.0), (2, 4.0), (3, 4.0)]
    assert found["cost/updates"][-1] == (3, 6.0)
    assert found["validation/error_rate"] == [(2, 0.5), (3, 0.5)]
    assert found["model/parameters"][0] == (0, 10.0)


def test_a_continued_run_is_written_once(tmp_path):
    first = RunScalars(tmp_path)
    first.rows(vision_rows()[:3])
    first.close()
    second = RunScalars(tmp_path)
    second.rows(vision_rows())
    second.close()
    assert [step for step, _ in scalars_in(tmp_path)["test/error_rate"]] == [0, 2, 3]


def test_what_earlier_processes_wrote_is_written_again_with_the_first_scalar(tmp_path):
    first = RunScalars(tmp_path)
    first.during_stage("perplexity", 70.0, 1, 0.5)
    first.close()
    again = RunScalars(tmp_path, at_first=lambda scalars: scalars.during_stage("perplexity", 70.0, 1, 0.5))
    again.close()  # nothing was written, so nothing is lost
    assert scalars_in(tmp_path)["during_stage/perplexity"] == [(500, 70.0)]
    again = RunScalars(tmp_path, at_first=lambda scalars: scalars.during_stage("perplexity", 70.0, 1, 0.5))
    again.during_stage("perplexity", 60.0, 2, 0.5)
    again.close()
    assert scalars_in(tmp_path)["during_stage/perplexity"] == [(500, 70.0), (1500, 60.0)]


def test_a_disk_that_is_full_at_the_first_scalar_stops_nothing(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
    scalars = RunScalars(tmp_path, at_first=lambda scalars: scalars.during_stage("perplexity", 70.0, 1, 0.5))
    scalars.during_stage("perplexity", 60.0, 2, 0.5)
    scalars.close()
    assert caplog.text.count("no further TensorBoard scalars") == 1


def test_a_language_model_is_called_alike(tmp_path):
    scalars = RunScalars(tmp_path)
    scalars.during_stage("validation_perplexity", 60.0, 2, 0.5)
    scores = Scores(
        10, 2, perplexity=50.0, word_perplexity=80.0, bits_per_byte=1.5, validation_perplexity=55.0, validation_loss=4.0
    )
    scalars.rows([LedgerRow(0, 0, False, scores), LedgerRow(1, 1, True, scores, Spent(10**12, 5, 1.0))])
    scalars.close()
    found = scalars_in(tmp_path)
    assert found["test/perplexity"] == [(0, 50.0), (1, 50.0)]
    assert found["test/bits_per_byte"] == [(0, 1.5), (1, 1.5)]
    assert found["stream/average_perplexity"] == [(1, 50.0)]
    assert found["during_stage/validation_perplexity"] == [(1500, 60.0)]
    assert {"validation/loss", "cost/train_tflops", "model/parameters"} <= found.keys()


def test_a_vision_run_writes_its_ledger(tmp_path):
    small_run(tmp_path / "run", seeds=2)
    for seed in (0, 1):
        folder = tmp_path / f"run/seed_{seed}"
        rows = Ledger(folder / "ledger.jsonl").rows()
        changed = [row for row in rows if row.t == 0 or row.updated]
        wanted = [(row.t, pytest.approx(row.scores.error_rate, rel=1e-6)) for row in changed]
        assert scalars_in(folder)["test/error_rate"][: len(changed)] == wanted


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_stops_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(EventsWriter, "__init__", on_a_full_disk)
    scalars, rows = RunScalars(tmp_path), vision_rows()
    for count in range(1, 5):
        scalars.rows(rows[:count])
        for update in range(500):  # more than the file keeps in memory
            scalars.during_stage("validation_perplexity", 60.0, 2, update / 500)
    scalars.close()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def on_a_full_disk(self, prefix: str) -> None:
    """Open a file on which every write fails, in place of EventsWriter.__init__."""
    self._lock, self._num_outstanding_events = threading.Lock(), 0
    self._py_recordio_writer = RecordWriter("/dev/full")
