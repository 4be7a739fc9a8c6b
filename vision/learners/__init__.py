"""The vision learners: which networks a stage trains, from where, and which of them predict.

base.py       what all have in common, and the registry
files.py      their files: networks after each step, predictor.json
ensembles.py  SM, Ens, UMix, gEns
mixtures.py   MoE, gMoE, gMoE with a flat gate, ensemble of mixtures
firefly.py    FF

Labels and settings of the learners are in `fairseq_alma.core.catalogue`. A learner of your own is a subclass with the
decorator `register_learner`.
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
