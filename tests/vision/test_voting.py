"""How the outputs of members are combined, worked out by hand."""

from math import log

import pytest
import torch

from vision.voting import MemberOutputs, sum_members


def logits_of(*members):
    """Return logits [M, b, C] of one seed from the probabilities of each member and example."""
    return torch.tensor(members).log()


# In the first example, two members slightly prefer class 0 and one strongly prefers class 1. In the second example all
# members choose class 2.
THREE = logits_of([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]], [[0.5, 0.4, 0.1], [0.1, 0.1, 0.8]], [[0.1, 0.8, 0.1], [0, 0, 1]])


def test_probabilities_are_averaged():
    total = sum_members(THREE, 1, "probability")
    torch.testing.assert_close(total.summed_SbC, torch.tensor([[[1.1, 1.6, 0.3], [0.3, 0.3, 2.4]]]))
    assert total.predicted_classes().tolist() == [[1, 2]]
    assert total.num_members == 3


def test_votes_are_counted():
    total = sum_members(THREE, 1, "vote")
    assert total.votes_SbC.tolist() == [[[2, 1, 0], [0, 0, 3]]]
    assert total.predicted_classes().tolist() == [[0, 2]]


def test_logits_are_averaged():
    # The mean is (1, 2, 1.5). If probabilities were averaged, the first member, which is sure, would decide: class 0.
    logits = torch.tensor([[[8.0, 2.0, 0.0]], [[-6.0, 2.0, 3.0]]])
    total = sum_members(logits, 1, "logit")
    assert total.summed_SbC.tolist() == [[[2, 4, 3]]]
    assert total.predicted_classes().tolist() == [[1]]
    assert sum_members(logits, 1, "probability").predicted_classes().tolist() == [[0]]
    expected = -log(torch.tensor([1.0, 2.0, 1.5]).softmax(-1)[2])
    assert total.loss(torch.tensor([[2]])) == [pytest.approx(expected)]


def test_equal_votes_are_decided_by_the_mean_probability():
    # Classes 0 and 1 have one vote each. The summed probability of class 1 is 0.9, that of class 0 is 0.8.
    total = sum_members(logits_of([[0.2, 0.6, 0.2]], [[0.6, 0.3, 0.1]]), 1, "vote")
    assert total.votes_SbC.tolist() == [[[1, 1, 0]]]
    assert total.predicted_classes().tolist() == [[1]]


def test_the_mean_probability_never_outweighs_a_vote():
    # Class 0 has three votes with probability 0.4 each. Class 1 has two votes with probability 1 and so a larger sum of
    # probabilities, 2 + 3 x 0.39, but fewer votes.
    total = sum_members(logits_of(*[[[0.4, 0.39, 0.21]]] * 3, *[[[0.0, 1.0, 0.0]]] * 2), 1, "vote")
    assert total.summed_SbC[0, 0, 1] > total.summed_SbC[0, 0, 0]
    assert total.predicted_classes().tolist() == [[0]]


@pytest.mark.parametrize("combine", ["probability", "logit", "vote"])
def test_outputs_of_some_members_add_up_to_those_of_all(combine):
    # 2 seeds with 5 members each. The outputs of members 0 and 1 and those of members 2 to 4 are added.
    logits_SNbC = torch.randn(2, 5, 40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (1, 40), generator=torch.Generator().manual_seed(1))
    first, rest = (sum_members(part.flatten(0, 1), 2, combine) for part in logits_SNbC.split([2, 3], dim=1))
    whole = sum_members(logits_SNbC.flatten(0, 1), 2, combine)
    added = sum((first, rest), MemberOutputs.empty())
    assert added.num_members == whole.num_members == 5
    torch.testing.assert_close(added.summed_SbC, whole.summed_SbC)
    assert torch.equal(added.predicted_classes(), whole.predicted_classes())
    assert added.error_rate(y) == whole.error_rate(y)
    assert added.loss(y) == pytest.approx(whole.loss(y))


@pytest.mark.parametrize("combine", ["probability", "logit", "vote"])
def test_empty_outputs_add_nothing_from_either_side(combine):
    total = sum_members(THREE, 1, combine)
    assert MemberOutputs.empty() + total is total
    assert total + MemberOutputs.empty() is total


def test_seeds_are_combined_separately():
    # Two members of seed 0, then two of seed 1.
    logits = torch.tensor([[[3.0, 0.0]], [[1.0, 0.0]], [[0.0, 3.0]], [[0.0, 1.0]]])
    assert sum_members(logits, 2, "vote").votes_SbC.tolist() == [[[2, 0]], [[0, 2]]]
    assert sum_members(logits, 2, "probability").error_rate(torch.tensor([[0]])) == [0.0, 1.0]


def test_the_error_rate_is_exact():
    logits = torch.zeros(2, 300, 2)
    logits[0, :1, 1] = 1  # seed 0 predicts class 1 for one example, seed 1 for seven; else class 0
    logits[1, :7, 1] = 1
    total = sum_members(logits, 2, "probability")
    assert total.error_rate(torch.zeros(1, 300, dtype=torch.long)) == [1 / 300, 7 / 300]
    labels = torch.tensor([0, 1])[:, None].expand(2, 300)  # other labels for each seed
    assert total.error_rate(labels) == [1 / 300, 293 / 300]


@pytest.mark.parametrize("combine", ["probability", "vote"])
def test_the_loss_is_that_of_the_mean_probability(combine):
    # The mean probabilities of the true classes 1 and 0 are 1.6 / 3 and 0.3 / 3.
    loss = sum_members(THREE, 1, combine).loss(torch.tensor([[1, 0]]))
    assert loss == [pytest.approx((log(3 / 1.6) + log(10)) / 2, rel=1e-6)]


def test_the_loss_of_an_impossible_class_is_large_and_finite():
    loss = sum_members(torch.tensor([[[0.0, 200.0]]]), 1, "probability").loss(torch.tensor([[0]]))
    assert loss == [pytest.approx(87.5, abs=0.1)]  # the logarithm of 1e-38, about the smallest float
