"""The models that this package registers with fairseq. This package needs fairseq."""
