"""Anytime learning of images: digits, MNIST, EMNIST and CIFAR, on the protocol of fairseq_alma.core.

This package never imports fairseq.

run.py          the command alma-vision, from settings to ledger
settings.py     every setting, checked when it is made
learners/       the learners: SM, Ens, UMix, gEns, gMoE, FF, and those of the paper's first version
backbones.py    which networks the learners of a dataset are made of
evaluator.py    scores a learner on the test set, which it alone holds
datasets.py     reads datasets
cifar.py        reads the files of CIFAR-10 and CIFAR-100
stream.py       cuts a dataset into mega-batches
inputs.py       turns images into network inputs
batches.py      the data of a stage, and the batches drawn from it
training.py     trains a stack of networks in one stage and keeps the best epoch
optimizers.py   AdaDelta and SGD for one flat tensor
voting.py       combines the outputs of ensemble members
networks/       stacks of networks that are computed together, with hand-written gradients
firefly/        growth of one network by gradient scores
flops.py        counts the FLOPs of a network
checkpoints.py  writes networks to files and reads them
seeds.py        random generators by name
process.py      threads, cuDNN and memory allocation of the process
display.py      shows the progress of a run
"""
