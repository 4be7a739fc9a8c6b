"""Tasks registered with fairseq. Needs fairseq."""
