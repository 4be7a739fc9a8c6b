"""Models registered with fairseq. Imports fairseq and `fairseq_alma.modules`."""
