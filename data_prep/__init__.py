"""alma-prep: from corpora to a stream folder of mega-batches (docs/design.md). Needs neither torch nor fairseq.

The steps, in order, and the modules that hold them:

    prepare, extend     make a new stream, or extend one; `pipeline` calls the steps below in order
    sources/            list files, and read documents out of each kind of file
    reading, cleaning   read every document once, remove unwanted ones, copy the rest into the `spool`
    deduplication       remove copies (`duplicates` finds them)
    partition, layout   cut passages, order them by seed, divide them into splits; `index` holds the result
    stream_tokenizer    train the tokenizer, or take the given one (`tokenization` holds the kinds)
    encoding            encode passages and write fairseq's files (`mmap_writer`, `dictionary`)
    work_folder         hold the work folder, and rename its shards into the finished `stream_folder`

`tasks` divides a step into tasks that survive a kill, with a `heartbeat` each. `workers` and `slurm` run them.
`options` and `settings` declare the command-line options, `cli` is the command, and `summary` prints its result.
"""
