"""alma-prep: turn corpora into a stream folder of mega-batches (docs/design.md). Needs neither torch nor fairseq.

The steps, in order, and the modules that implement them:

    prepare, extend     make a new stream, or extend one; `pipeline` calls the steps below in order
    sources/            list files, and read documents from each kind of file
    reading, cleaning   read every document once, remove unwanted ones, copy the rest into the `spool`
    deduplication       remove copies (`duplicates` finds them)
    partition, layout   cut long documents into passages, shuffle passages by seed, divide them into splits;
                        `index` defines the file that stores the result
    stream_tokenizer    train the tokenizer, or use a given one (`tokenization` implements the tokenizers)
    encoding            encode passages and write fairseq's files (`mmap_writer`, `dictionary`)
    work_folder         lock the work folder, and move its shards into the finished `stream_folder`

`tasks` divides a step into tasks. A killed run can be continued at its first unfinished task. Each running task has a
`heartbeat`. `workers` and `slurm` run tasks. `options` and `settings` declare the command-line options, `cli` is the
command, and `summary` formats the result that it prints.
"""
