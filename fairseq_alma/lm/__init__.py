"""alma-lm: the language-model learners, their members, and the fairseq-train processes that train the members.

Only fairseq_train.py imports fairseq. Training runs in separate processes.
"""
