"""The program alma-prep, which turns corpora into a stream folder (docs/design.md). It needs no torch and no fairseq.

A stream is a sequence of mega-batches, with a validation set and a test set. A mega-batch is a large portion of
training text. A model is trained on one mega-batch after another. The mega-batches, the validation set and the test set
are called the splits of the stream.

The steps, in order, and the modules that implement them:

    prepare, extend     make a new stream, or extend one; `pipeline` calls the steps below in order
    sources/            list files, and read documents from each kind of file
    reading, cleaning   read every document once, remove unwanted documents, and copy the rest into the `spool`, a
                        folder of plain text files; `quality` and `filters` find what is unwanted, `paragraphs` finds
                        lines that are repeated, and `removed` keeps removed documents to be looked at; `read_store`
                        keeps what was read for later calls, and `entries` makes the index entries of the documents
    deduplication       remove copies of documents (`duplicates` decides which, `near_copies` finds similar pairs,
                        `candidates` finds pairs to compare, `signatures` and `ngrams` describe texts by hashes), and
                        record the documents for --extend (`left_out`: the text that shares left out)
    shares              how many words of each source the stream uses
    partition, layout   cut long documents into passages, shuffle the passages, divide them into splits (`hold_out`:
                        with whole documents in the validation set and the test set);
                        `index` defines the file that stores the order of the passages and the splits
    stream_tokenizer    train a tokenizer, or copy a given one (`tokenization` implements the tokenizers)
    leakage             report, or remove, overlaps of training with held-out text (`overlap` finds them, `held_out`
                        reads the text)
    encoding            encode passages and write fairseq's files (`mmap_writer`, `dictionary`)
    work_folder         lock the work folder, and move the finished files from it into the `stream_folder`

`tasks` divides a step into tasks, which run in parallel; `task_list` stores the list for the workers. If alma-prep is
killed, its next call does only the unfinished tasks. While a task runs, the worker rewrites a `heartbeat` file to show
progress. `workers` runs tasks on this machine. `slurm` runs them as Slurm jobs: `slurm_job` is the program of a job,
and `slurm_arrays` follows the jobs. `machine` contains the defaults that depend on where alma-prep runs.
`dry_run` does all steps with a sample of the files (`sampling`), and `inspection` shows a finished stream.
`options`, `settings` and `cluster` declare the command-line options, `cli` is the command, and `summary`
formats the tables that the command prints at the end.
"""
