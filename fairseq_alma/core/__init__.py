"""Core of the project: Algorithm 1 of the paper, the ledger (table of the results) and the run folder.

This package imports only the standard library and its own modules.
"""
