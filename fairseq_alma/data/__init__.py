"""The training data of a stage as fairseq datasets: blocks of tokens, replay, names of mega-batches. Needs fairseq."""
