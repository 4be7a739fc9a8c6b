"""alma-prep: corpora -> a stream folder of mega-batches (DESIGN section 4). Needs neither torch nor fairseq.

The way of the data, one room each:
sources -> spool -> partition -> tokenization, dictionary -> mmap_writer -> stream_folder; `prepare` leads it through.
"""
