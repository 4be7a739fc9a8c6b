"""alma-prep: corpora -> a stream folder of mega-batches (DESIGN section 4). Needs neither torch nor fairseq.

The way of the data, one room each:

    sources -> cleaning -> spool       reading       every document once, in pieces, on all cores
            -> duplicates              steps         which documents stay
            -> partition               steps         passages, their seeded order, the cuts
            -> tokenization -> mmap    encoding      the tokenizer is frozen, then pieces are encoded and joined
            -> stream_folder           prepare       whole in one moment

`pieces` makes work survive kills; `workers` and `slurm` are where pieces are made. `steps.make_pieces` leads through.
"""
