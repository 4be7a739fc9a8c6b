"""The training data of a stage as fairseq datasets: blocks of tokens, replay, sets of mega-batches. Needs fairseq."""
