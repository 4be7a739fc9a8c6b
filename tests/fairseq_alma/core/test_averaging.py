"""The settings of the predictor: predict_with, average_every, average_window, average_decay."""

import pytest

from fairseq_alma.core.averaging import AverageSettings
from fairseq_alma.core.errors import SettingError


def averaged(settings: AverageSettings, values: list[float]) -> float:
    """Return the average of values that come one after another."""
    average = 0.0
    for count, value in enumerate(values, start=1):
        average += settings.weight_of_newest(count) * (value - average)
    return average


def test_without_a_decay_all_parameters_have_the_same_weight():
    assert averaged(AverageSettings("average"), [1.0, 2.0, 6.0]) == pytest.approx(3.0)


def test_a_decay_gives_older_parameters_less_weight():
    settings = AverageSettings("average", average_decay=0.5)
    # 1; (1 + 3) / 2 = 2; (2 + 6) / 2 = 4
    assert averaged(settings, [1.0, 3.0, 6.0]) == pytest.approx(4.0)


def test_with_a_power_the_average_is_over_the_last_part():
    # The weights of stages 1, 2 and 3 are 1/6, 2/6 and 3/6 for the power 1.
    assert averaged(AverageSettings("average", average_power=1.0), [6.0, 12.0, 2.0]) == pytest.approx(6.0)
    # Half of the weight lies on the stages after (1/2)^(1/9) of the stream, with the power 8.
    values = [0.0] * 926 + [1.0] * 74
    assert averaged(AverageSettings("average", average_power=8.0), values) == pytest.approx(0.5, abs=0.02)


def test_the_first_parameters_do_not_dominate_a_slow_decay():
    assert averaged(AverageSettings("average", average_decay=0.99), [100.0, *[1.0] * 9]) == pytest.approx(10.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average_decay": 0.9}, "average_decay=0.9 needs predict_with=average, but predict_with=last"),
        ({"average_every": "update", "average_window": 3}, "average_every=update average_window=3 needs"),
        ({"predict_with": "average", "average_decay": 1.0}, "average_decay=1.0 must be above 0 and below 1"),
        ({"predict_with": "average", "average_decay": 0.5, "average_window": 3}, "exclude each other"),
        ({"predict_with": "average", "average_every": "update", "average_window": 3}, "average_window=3 counts stages"),
        ({"predict_with": "average", "average_decay": 0.5, "average_power": 1.0}, "exclude each other"),
        ({"average_power": 1.0}, "average_power=1.0 needs predict_with=average"),
        ({"predict_with": "mean"}, "predict_with='mean' is not one of last, average"),
        ({"predict_with": "average", "average_window": 0}, "average_window=0 must be an integer of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        AverageSettings(**settings)
