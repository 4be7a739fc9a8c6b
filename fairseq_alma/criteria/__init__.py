"""The loss functions (criteria) that this package registers with fairseq. Needs fairseq."""
