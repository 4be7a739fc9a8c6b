"""The optimizers that this package registers with fairseq. Needs fairseq."""
