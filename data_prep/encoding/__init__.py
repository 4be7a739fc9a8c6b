"""Make the tokenizer of a stream, encode its passages, and write fairseq's files and the folder `documents`."""
