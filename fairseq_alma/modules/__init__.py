"""The parts of a Switch Transformer (Fedus et al., 2021). Needs torch only."""
