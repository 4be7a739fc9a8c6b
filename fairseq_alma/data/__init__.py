"""What a stage trains on, as fairseq datasets. Imports fairseq's data classes and `fairseq_alma.core`."""
