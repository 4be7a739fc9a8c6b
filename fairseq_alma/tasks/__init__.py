"""The tasks that this package registers with fairseq. Needs fairseq."""
