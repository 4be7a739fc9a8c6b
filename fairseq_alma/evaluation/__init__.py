"""Evaluation of language models: perplexity on a split, scores of a run, scores on tasks, FLOPs.

members.py needs fairseq, and harness.py needs lm-evaluation-harness.
"""
