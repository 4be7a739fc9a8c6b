"""alma-lm: the language-model learners, their members, and the fairseq-train processes that train them.

Only fairseq_train.py imports fairseq. Training runs in processes of their own.
"""
