"""A generator of its own for everything that has a name."""

import torch

from vision.seeds import generator


def numbers(*name):
    return torch.rand(4, generator=generator(*name)).tolist()


def test_a_name_draws_the_same_numbers_again():
    assert numbers(3, "order", 0, 1) == numbers(3, "order", 0, 1)


def test_every_other_name_draws_others():
    names = [(3, "order", 0, 1), (4, "order", 0, 1), (3, "gates", 0, 1), (3, "order", 1, 1), (3, "order", 0, 2)]
    drawn = [numbers(*name) for name in names]
    assert all(drawn.count(one) == 1 for one in drawn)
    assert numbers(1, 23) != numbers(12, 3)


def test_the_numbers_of_a_name_are_these_on_every_machine():
    # As first drawn: another sequence would change every run that is continued.
    assert torch.randint(1000, (5,), generator=generator(0, "order", 0, 1)).tolist() == [571, 501, 426, 300, 625]


def test_drawing_from_one_shifts_nothing_of_another():
    expected = numbers(0, "b")
    first, second = generator(0, "a"), generator(0, "b")
    torch.rand(100, generator=first)
    torch.rand(100)
    assert torch.rand(4, generator=second).tolist() == expected
