"""alma-eval and the evaluator: perplexity and FLOPs of checkpoints, with fairseq in this process."""
