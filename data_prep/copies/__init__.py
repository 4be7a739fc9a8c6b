"""Find and remove copies of documents, and record the documents of a stream for later extensions."""
