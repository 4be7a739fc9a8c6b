"""The program alma-prep, which turns corpora into a stream folder (docs/design.md). It needs no torch and no fairseq.

A stream is a sequence of mega-batches, with a validation set and a test set. A mega-batch is a large portion of
training text. A model is trained on one mega-batch after another. The mega-batches, the validation set and the test set
are called the splits of the stream.

The packages follow the path of the data. A package imports from packages above it only (`tests/test_imports.py`):

    sources         list files, and read documents from each kind of file
    cleaning        decide which documents to remove, and change the text of others
    tokenization    the tokenizers, and the dictionary
    settings        the command-line options, and the checks of their values
    running         divide a step into tasks, which run in parallel. `workers` runs tasks on this machine; `slurm` runs
                    them as Slurm jobs. If alma-prep is killed, its next call does only the unfinished tasks.
                    `work_folder` locks the work folder, runs its steps, and moves the finished files into the
                    `stream_folder`
    reading         `read`: read every document once, and copy what passes the cleaning into the `spool`, a folder of
                    plain text files, with signatures (`signatures`, `ngrams`), dates and ids (`facts`), and make the
                    index entries of the documents. `index` defines the file that stores the order of the passages
                    and the splits
    copies          `deduplication`: remove copies (`near_copies` finds pairs of similar documents and decides which to
                    remove, `candidates` finds pairs to compare), and record the documents for --extend
    accounts        compare what was read with what is in the stream and what was removed
    dividing        `partition`, `shares`, `layout`: cut long documents into passages, choose how many words of each
                    source the stream uses, shuffle the passages, divide them into splits (`chronological`: in order of
                    dates)
    encoding        `stream_tokenizer`: train a tokenizer, or copy a given one; `encode`, `mmap_writer`, `documents`:
                    encode passages, write fairseq's files, and the folder with the documents' ids
    leakage         report, or remove, overlaps of training with held-out text (`overlap` finds them)

The module `prepare` makes a new stream, or extends one. `pipeline` calls the steps in order, and `checks` refuses what
cannot work before anything is read. `cli` is the command, and `summary` the tables that it prints at the end.
"""
