"""The modules of a Switch Transformer (Fedus et al., 2021). This package needs only torch."""
