"""Tokenizers, and the dictionary of a stream. A stream's tokenizer is made in `encoding.stream_tokenizer`."""
