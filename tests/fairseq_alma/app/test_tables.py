"""The table of a ledger, and what is said about mega-batches that wait."""

import io
import math

from fairseq_alma.app.tables import ledger_table, new_text_message, waiting_message, wide_console
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores


def rows_with_stages_at(*updated: int, last: int) -> list[LedgerRow]:
    scores = Scores(num_params=1, forward_flops=1, error_rate=0.5)
    return [LedgerRow(t, sum(k <= t for k in updated), t in updated, scores) for t in range(last + 1)]


def test_mega_batches_that_wait_are_named():
    assert waiting_message(rows_with_stages_at(2, 4, 6, last=6), 2) is None
    said = waiting_message(rows_with_stages_at(2, 4, 6, last=7), 2)
    assert said == "mega-batch 7 waits for 1 more (wait=2); to train now, give last_group=train"
    said = waiting_message(rows_with_stages_at(1, 2, last=4), "auto")
    assert said == "mega-batches 3 to 4 wait for later ones (wait=auto); to train now, give last_group=train"
    said = waiting_message(rows_with_stages_at(last=3), 10)
    assert said == "mega-batches 1 to 3 wait for 7 more (wait=10); to train now, give last_group=train"


def test_a_new_mega_batch_is_compared_with_numbered_earlier_ones():
    scores = Scores(1, 1, perplexity=1.0, validation_loss=math.log(130.0))
    rows = [LedgerRow(6, 6, True, scores)]
    rows += [
        LedgerRow(t, t, True, scores, prequential=Prequential(None, math.log(perplexity), 100))
        for t, perplexity in ((7, 146.0), (8, 2.5e9))
    ]
    assert new_text_message(rows, 9, Prequential(None, math.log(106.0), 100)) == (
        "mega-batch 9, before training on it: perplexity 106.0 (validation set 130.0)"
        "; earlier mega-batches: 7: 146.0, 8: 2.5e+09"
    )


def test_a_loss_too_large_for_a_perplexity_is_no_error():
    rows = [LedgerRow(0, 0, False, Scores(1, 1, perplexity=1.0, validation_loss=5e6))]
    assert "perplexity inf (validation set inf)" in new_text_message(rows, 1, Prequential(None, 800.0, 100))


def test_bits_per_byte_are_a_column_if_they_are_known():
    def printed(**more) -> str:
        untrained = Scores(1, 1, perplexity=900.0, validation_perplexity=900.0)
        trained = Scores(1, 1, perplexity=50.0, word_perplexity=80.0, validation_perplexity=55.0, **more)
        rows = [LedgerRow(0, 0, False, untrained), LedgerRow(1, 1, True, trained)]
        wide_console(text := io.StringIO()).print(ledger_table(rows, "a run"))
        return text.getvalue()

    assert "bits/byte" not in printed()
    assert "bits/byte" in printed(bits_per_byte=1.25) and " 1.250 " in printed(bits_per_byte=1.25)
