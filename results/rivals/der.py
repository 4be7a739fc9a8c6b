"""DER++ for images: dark experience replay (Buzzega et al. 2020, arXiv 2004.07211, algorithm 2).

alma-vision plugin=results.rivals.der learner=derpp memory=500 alpha=0.2 beta=0.5 replay=0.667 select_by=last ...

With `replay=0.667`, as in the paper, a third of each batch is new, a third comes from the memory for the distance from
stored logits, and a third for the cross entropy. The logits of an example are those of the network after the stage in
which it arrived, without augmentation. The paper takes those of the training step, which cost nothing.
"""

from base64 import b64decode, b64encode
from dataclasses import dataclass, replace

import torch

from fairseq_alma.core.ledger import Spent
from results.rivals.er import ExperienceReplay, MemorySettings
from vision.learners import register_learner
from vision.training import OwnLoss, smoothed


@dataclass(frozen=True)
class DarkSettings(MemorySettings):
    """Settings of DER++."""

    alpha: float = 0.2
    """Weight of the squared distance from the stored logits, a mean over the classes."""
    beta: float = 0.5
    """Weight of the cross entropy of examples in the memory."""


class DarkLoss(OwnLoss):
    """Cross entropy plus squared distance from stored logits, with weights for each example."""

    def gradient(self, logits, targets):
        """`targets` [M, b, 2 C + 2]: one-hot vector, stored logits, weight of the cross entropy, of the distance."""
        num_classes = logits.shape[-1]
        one_hot, stored, entropy_weight, distance_weight = targets.split([num_classes, num_classes, 1, 1], -1)
        entropy = logits.softmax(-1) - smoothed(one_hot, self.label_smoothing)
        distance = 2 / num_classes * (logits - stored)
        return (entropy_weight * entropy + distance_weight * distance) / logits.shape[1]


@register_learner("derpp", label="DER++", settings=DarkSettings)
class DarkExperienceReplay(ExperienceReplay):
    """One network that trains on new examples and on a memory of earlier ones and of its logits for them."""

    learner_settings: DarkSettings
    copies = 2
    logits_SmC = None
    """The stored logits of the examples in the memory. None before stage 1."""

    def loss(self):
        return DarkLoss(len(self.seeds), self.networks_per_seed, self.settings.label_smoothing)

    def stage_data(self, stage):
        data, own = super().stage_data(stage), self.learner_settings
        rows, size, share = data.training, data.num_past // 2, stage.past_share
        one_hot_SnC = rows.one_hot.unflatten(0, (rows.num_seeds, -1))
        num_classes = one_hot_SnC.shape[-1]
        targets = torch.cat([one_hot_SnC, torch.zeros_like(one_hot_SnC), torch.zeros_like(one_hot_SnC[..., :2])], -1)
        targets[:, 2 * size :, -2] = 1 / (1 - share)  # so that each of the three terms is a mean over its examples
        if size:  # the first copy of the memory is for the distance, the second for the cross entropy
            targets[:, :size, num_classes:-2], targets[:, :size, -1] = self.logits_SmC, own.alpha * 2 / share
            targets[:, size : 2 * size, -2] = own.beta * 2 / share
        return replace(data, training=replace(rows, one_hot=targets.flatten(0, 1)))

    def train(self, stage):
        """Train one stage, and store the logits of the examples that enter the memory. Return the cost of both."""
        spent = super().train(stage)
        rows = self.memory.stage_data(stage.new, (), False).training
        num_past = sum(len(one.data[0].training) for one in stage.past)
        places_Sm = self.places([*stage.past, *stage.new])
        is_new_Sm = places_Sm >= num_past
        used = (places_Sm[is_new_Sm] - num_past).unique()  # in the memory of any seed
        logits_SuC = self.stack.logits_of_many(rows.examples[:, used.to(rows.device)])
        before, self.logits_SmC = self.logits_SmC, logits_SuC.new_zeros(*places_Sm.shape, logits_SuC.shape[-1])
        if before is not None:
            self.logits_SmC[:, : before.shape[1]] = before
        for seed, (places, is_new) in enumerate(zip(places_Sm, is_new_Sm, strict=True)):
            self.logits_SmC[seed, is_new] = logits_SuC[seed, torch.searchsorted(used, places[is_new] - num_past)]
        return [one + Spent(train_flops=self.stack.flops.forward * len(used)) for one in spent]

    def extra_state(self):
        """Return the logits as text, because as JSON numbers they take a second to write."""
        if self.logits_SmC is None:
            return {}
        text = b64encode(self.logits_SmC.cpu().numpy().tobytes()).decode()
        return {"logits": text, "logits_shape": list(self.logits_SmC.shape)}

    def set_extra_state(self, state):
        if "logits" not in state:
            self.logits_SmC = None
        else:
            flat = torch.frombuffer(bytearray(b64decode(state["logits"])), dtype=torch.float32)
            self.logits_SmC = flat.view(state["logits_shape"]).to(self.device)
