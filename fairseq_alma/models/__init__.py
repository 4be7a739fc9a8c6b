"""Models registered with fairseq. Needs fairseq."""
