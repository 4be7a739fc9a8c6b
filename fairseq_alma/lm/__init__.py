"""alma-lm: the language-model learners, their members, and the processes that train the members.

alma-lm starts a separate process for each member. Only fairseq_config.py and train_member.py import fairseq.
"""
