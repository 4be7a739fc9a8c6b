"""Anytime learning on image datasets (digits, MNIST, EMNIST, CIFAR), with the protocol of fairseq_alma.core.

This package never imports fairseq.

A dataset is cut into mega-batches, which arrive one after another. A stage is one training round on the mega-batches
that have arrived since the stage before. A learner is a method that trains networks in stages. A ledger is the table of
a learner's scores and costs, with one row per mega-batch. A stack is several networks of one shape that are computed
together.

run.py          the command alma-vision: runs a learner over a stream of mega-batches and writes the ledger
settings.py     the settings of a run, checked when the settings object is created
learners/       the learners: SM, Ens, UMix, gEns, gMoE, FF, and three from the first version of the paper
backbones.py    chooses the network architecture for each dataset
evaluator.py    computes the scores of a learner on the test set; only the evaluator uses the test set
datasets.py     loads datasets
cifar.py        reads the CIFAR-10 and CIFAR-100 files
stream.py       cuts a dataset into mega-batches
inputs.py       turns images into network inputs
batches.py      the data of a stage, and the batches sampled from it
training.py     trains networks in one stage and restores the parameters of the best epoch
optimizers.py   AdaDelta and SGD for one flat tensor that contains all parameters
voting.py       combines the outputs of ensemble members
networks/       stacks: networks of one shape that are computed together, with hand-written gradients
firefly/        growth of a network in width and depth, where gradients show that the loss decreases most (Firefly)
flops.py        counts the FLOPs of a network
checkpoints.py  writes networks to files and reads them
seeds.py        random generators, whose seeds are computed from the purpose of the random numbers
process.py      sets threads, cuDNN options and memory allocation of the process
display.py      shows the progress of a run
"""
