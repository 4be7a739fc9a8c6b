"""Anytime learning on image datasets, with the protocol of fairseq_alma.core.

This package never imports fairseq.

Terms:

mega-batch  a part of a dataset; the mega-batches of a stream arrive one after another
stage       one training round, on the mega-batches that have arrived since the previous stage
learner     a method that trains networks in stages and predicts with them
run         the folder with the results of one combination of settings and one random seed
ledger      a table of the run's scores and costs, with one row for the untrained learner and one per mega-batch
stack       several networks of one shape that are computed together

Files:

cli.py          the command alma-vision
runs.py         trains a learner on a stream of mega-batches, and writes the run folder
settings.py     the settings of a run; their values are checked when the settings object is created
learners/       the learners: SM, Ens, UMix, gEns, gMoE, FF, and three from the first version of the paper
backbones.py    chooses the network architecture for each dataset
evaluator.py    computes the scores of a learner on the test set; no other module uses the test set
dataset_names.py  what the setting `dataset` can name
datasets/       loads datasets: known ones, folders of images, .npz files, torchvision, Hugging Face, the user's own
stream.py       cuts a dataset into mega-batches, which form a stream
orders.py       which examples arrive together: at random, class after class, by a column, by folder
inputs.py       turns images into network inputs
rows.py         tables of examples: small ones on the device, large ones that stay in the dataset
batches.py      the data of a stage, and the batches sampled from these data
training.py     trains networks for one stage and restores the parameters of the best epoch
optimizers.py   AdaDelta and SGD for one flat tensor that contains all parameters
voting.py       combines the outputs of ensemble members
networks/       stacks, with hand-written gradients
firefly/        the Firefly method: adds units and layers to a network where they lower the loss fastest
flops.py        counts the FLOPs of a network
checkpoints.py  writes networks to files and reads them
seeds.py        creates random generators, separate ones for initial parameters, order of examples, and so on
process.py      sets threads, cuDNN options and memory allocation of the process
display.py      shows the progress of a run
"""
