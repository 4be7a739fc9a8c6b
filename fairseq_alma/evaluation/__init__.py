"""Evaluation of language models: perplexity on a split, scores of a run, FLOPs. perplexity.py needs fairseq."""
