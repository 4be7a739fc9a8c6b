"""The parts of a Switch Transformer (Fedus et al., 2021). torch only: these files know nothing of fairseq."""
