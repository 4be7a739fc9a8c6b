"""The vision learners.

A learner decides which networks a stage trains, from which parameters the training starts, and which networks predict.

Names and settings of the learners are listed in `fairseq_alma.core.catalogue`. To add a learner, write a subclass of
`VisionLearner` and decorate it with `register_learner`.
"""

from fairseq_alma.core.learner_settings import LearnerSettings
from vision.learners.base import LEARNERS, VisionLearner, register_learner
from vision.learners.ensembles import Ensemble, GrowingEnsemble, SingleModel, UnionMix
from vision.learners.firefly import Firefly
from vision.learners.mixtures import EnsembleOfMixtures, GrowingFlatMixture, GrowingMixture, Mixture, worst_experts

__all__ = [
    "LEARNERS",
    "Ensemble",
    "EnsembleOfMixtures",
    "Firefly",
    "GrowingEnsemble",
    "GrowingFlatMixture",
    "GrowingMixture",
    "LearnerSettings",
    "Mixture",
    "SingleModel",
    "UnionMix",
    "VisionLearner",
    "register_learner",
    "worst_experts",
]
