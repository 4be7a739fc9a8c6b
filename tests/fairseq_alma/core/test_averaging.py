"""The setting `average`: the weights with which parameters are averaged."""

import pytest

from fairseq_alma.core.averaging import AverageWeights
from fairseq_alma.core.errors import SettingError


def averaged(setting: str, values: list[float]) -> float:
    """Return the average of the values, computed one after another."""
    average, weights = 0.0, AverageWeights.parse(setting)
    for count, value in enumerate(values, start=1):
        average += weights.weight_of_newest(count) * (value - average)
    return average


def test_with_a_power_of_0_all_have_the_same_weight():
    assert averaged("power:0", [1.0, 2.0, 6.0]) == pytest.approx(3.0)


def test_a_decay_halves_the_weights_of_older_values_once_there_are_enough():
    weights = AverageWeights.parse("decay:0.5")
    assert [weights.weight_of_newest(count) for count in (1, 2, 3)] == [1.0, 0.5, 0.5]


def test_a_power_gives_the_newest_values_more_weight():
    # The weights of three values are 1, 2 and 3 sixths.
    assert averaged("power:1", [6.0, 12.0, 2.0]) == pytest.approx(6.0)
    values = [0.0] * 926 + [1.0] * 74
    # (1 - 0.074) ** 9 is 0.5: half of the weight is on the last 7.4%, however many values there are.
    assert averaged("power:8", values) == pytest.approx(0.5, abs=0.02)


def test_the_first_values_do_not_dominate_a_long_average():
    assert averaged("decay:0.99", [100.0, *[1.0] * 9]) == pytest.approx(10.9)


@pytest.mark.parametrize(
    "text", ["mean", "power", "power:-1", "power:1000", "power:x", "decay:1", "decay:0", "decay:nan"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(SettingError, match=f"average={text} must be power:P with a number P"):
        AverageWeights.parse(text)
