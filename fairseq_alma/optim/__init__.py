"""The optimizer and the learning-rate scheduler that this package registers with fairseq. Needs fairseq."""
