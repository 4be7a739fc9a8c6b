"""The models that this package registers with fairseq. Needs fairseq."""
