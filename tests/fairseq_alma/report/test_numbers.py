import math

import numpy as np
import pytest

from fairseq_alma.report.numbers import Estimate, all_numbers, standard_error
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.ledgers import write_text, write_vision


def numbers_in(folder):
    [comparison] = read_runs([folder]).comparisons
    return all_numbers(comparison)


def test_the_scalars_of_one_seed(tmp_path):
    # wait 2, B = 4: 0.9 while waiting, 0.5 at t = 2 and 3, 0.2 at the end.
    write_vision(
        tmp_path / "a", [0.9, 0.9, 0.5, 0.5, 0.2], wait=2, validations=[0, 0, 0.4, 0.4, 0.1], wall_seconds=12.5
    )
    [result] = numbers_in(tmp_path)
    assert result.quality.mean == pytest.approx(0.9 + 0.5 + 0.5 + 0.2)
    assert result.quality.stderr is None
    assert (result.final.mean, result.final_validation.mean) == (0.2, 0.1)
    assert (result.num_params, result.forward_flops) == (10, 3)
    assert (result.mem, result.comp) == (
        50,
        400,
    )  # five arrivals of 10 parameters; two stages on two mega-batches of 100
    assert result.wall_seconds == 12.5
    # Validation: nothing before the first stage, where all learners are charged the untrained 0.9.
    assert result.validation_score == pytest.approx((0.9 + 0.4 + 0.4 + 0.1) / 4)


def test_mean_and_standard_error_over_seeds(tmp_path):
    for seed, last in enumerate((0.1, 0.2, 0.6)):
        write_vision(tmp_path / str(seed), [0.9, 0.5, last], seed=seed)
    [result] = numbers_in(tmp_path)
    # 0.6, 0.7, 1.1: mean 0.8, squared deviations 0.04 + 0.01 + 0.09 = 0.14, / 2 / 3.
    assert result.quality.mean == pytest.approx(0.8)
    assert result.quality.stderr == pytest.approx(math.sqrt(0.14 / 2 / 3))
    assert result.quality.text() == "0.80 ± 0.15"
    assert result.final.text(1, 100) == "30.0 ± 15.3"


def test_all_untrained_learners_are_charged_the_same_validation_score(tmp_path):
    write_vision(tmp_path / "a", [0.8, 0.8, 0.1], wait=2, width=4)
    write_vision(tmp_path / "b", [1.0, 1.0, 0.1], wait=2, width=8)
    a, b = numbers_in(tmp_path)
    assert a.validation_score == b.validation_score == pytest.approx((0.9 + 0.1) / 2)
    assert (a.quality.mean, b.quality.mean) == (pytest.approx(0.9), pytest.approx(1.1))


def test_the_scalars_of_a_language_model(tmp_path):
    write_text(tmp_path / "a", [900.0, 900.0, 50.0, 40.0], wait=2, validations=[800.0, 800.0, 60.0, 30.0])
    [result] = numbers_in(tmp_path)
    assert result.quality.mean == pytest.approx((900 + 50 + 40) / 3)
    assert result.validation_score == result.prequential.mean == pytest.approx((800 * 60 * 30) ** (1 / 3))
    assert (result.final.mean, result.final_validation.mean) == (40, 30)
    assert (result.mem, result.comp) == (4000, 300)
    assert result.wall_seconds == 6.0  # no summary.json: the seconds of training


def test_a_run_that_is_not_finished_has_no_cer_and_no_score(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], mega_batches=4)
    [result] = numbers_in(tmp_path)
    assert result.quality is None and result.validation_score is None
    assert result.final.mean == 0.4
    assert result.comp == 200


def test_unfinished_seeds_are_compared_at_their_last_common_arrival(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], seed=0, mega_batches=4)
    write_vision(tmp_path / "b", [0.9, 0.7, 0.4, 0.3], seed=1, mega_batches=4)
    [result] = numbers_in(tmp_path)
    assert (result.final.mean, result.comp, result.mem) == (pytest.approx(0.6), 100, 20)


def test_the_numbers_of_a_run_with_only_t_0(tmp_path):
    write_vision(tmp_path / "a", [0.9], mega_batches=4)
    [result] = numbers_in(tmp_path)
    assert (result.quality, result.comp, result.final.mean) == (None, 0.0, 0.9)


def test_a_diverged_run_has_infinite_results_and_is_no_error(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0, float("inf")], validations=[900.0, 50.0, float("nan")])
    [result] = numbers_in(tmp_path)
    assert result.final.mean == math.inf
    assert result.validation_score is None


def test_the_band_is_the_standard_error():
    assert standard_error(np.array([[1.0, 2.0]])) is None
    assert standard_error(np.array([[1.0, 2.0], [3.0, 2.0]])).tolist() == pytest.approx([1.0, 0.0])


def test_prequential_errors_and_transfer_are_means_over_seeds(tmp_path):
    written = {"forgetting": 0.25, "backward_transfer": -0.25, "forward_transfer": 0.5}
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], prequential=[None, 0.9, 0.5], written=written)
    other = {**written, "forgetting": 0.75}
    write_vision(tmp_path / "b", [0.9, 0.5, 0.4], prequential=[None, 0.9, 0.7], written=other, seed=1)
    [result] = numbers_in(tmp_path)
    assert result.prequential.text(1, 100) == "60.0 ± 10.0"
    assert result.transfer["forgetting"].text() == "0.50 ± 0.25"
    assert (result.transfer["backward transfer"].mean, result.transfer["forward transfer"].mean) == (-0.25, 0.5)


def test_a_perplexity_near_the_largest_number_has_no_standard_error(tmp_path):
    for seed, last in enumerate((8e200, 2e201)):
        write_text(tmp_path / str(seed), [900.0, 50.0, last], seed=seed)
    [numbers] = numbers_in(tmp_path)
    assert numbers.final == Estimate(1.4e201)
    assert numbers.final.text() == "1.4e+201"
