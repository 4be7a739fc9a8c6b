"""alma-lm: the language-model learners, their members, and the fairseq-train processes that train the members.

alma-lm starts a separate fairseq-train process for each member. Only the file fairseq_train.py imports fairseq.
"""
