"""The vision learners on the core of `fairseq_alma.core`. Not built yet: this package is empty."""
