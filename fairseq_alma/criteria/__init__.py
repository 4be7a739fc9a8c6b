"""Criteria registered with fairseq. Needs fairseq."""
