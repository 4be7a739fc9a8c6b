"""The modules of a Switch Transformer (Fedus et al., 2021). Needs only torch."""
