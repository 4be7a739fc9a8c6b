"""Anytime learning of images: MNIST, EMNIST and digits, on the protocol of fairseq_alma.core. Never imports fairseq.

run.py         alma-vision: from settings to ledger
settings.py    every setting, checked when it is made
datasets.py    where images come from
stream.py      a dataset cut into mega-batches
learners.py    SM, Ens, UMix, gEns, gMoE, and those of the paper's first version
networks/      M networks computed together, their gradients written out
batches.py     what a stage trains on
training.py    one stage: epochs, batches, the best epoch kept
optimizers.py  of one flat tensor
voting.py      how members vote
evaluator.py   the test set's side
flops.py       what a network costs
"""
