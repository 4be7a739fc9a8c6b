"""Criteria registered with fairseq. Imports fairseq."""
