"""Cut documents into passages, choose how many words each source provides, and divide the passages into splits."""
