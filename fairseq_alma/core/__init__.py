"""Core of the project: Algorithm 1 of the paper, the ledger (table of the results) and the run folder.

This package imports only the standard library and its own modules.

errors.py            errors that the user can fix
printing.py          print texts without the characters that a terminal interprets
json_types.py        check values that were read from JSON against a declared type
files.py             write files atomically, so that no reader sees an incomplete file
lease.py             lock a run folder, so that only one process writes to it
stream.py            the stream of mega-batches (classes MegaBatch and MegaBatchStream)
stream_description.py   the file stream.json
stream_folder.py     a stream folder on disk, which `alma-prep` writes and `alma-lm` reads
ledger.py            the ledger, with one row for each mega-batch that arrives
metrics.py           the paper's metrics, computed from a ledger
averaging.py         settings of predictors that are averages of parameters
waiting.py           when a stage is due
protocol.py          Algorithm 1 (`run_stream`), and the interfaces of learners and evaluators
run_folder.py        the paths in a run folder
seed_record.py       read and write the files of a run with one seed
run_record.py        the progress of a run, for one or several seeds, so that an interrupted run can be continued
settings.py          base class of settings, which checks their values
learner_settings.py  settings that only some learners have
catalogue.py         list of all learners, with name, label and settings
datasets.py          list of the image datasets that have a name, with their defaults
"""
