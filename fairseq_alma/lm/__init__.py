"""alma-lm: the language-model learners, their members, and the fairseq-train processes that train the members.

Only fairseq_train.py imports fairseq. Each member is trained by a process of its own, which is started by alma-lm.
"""
