"""alma-lm: the language-model learners, their members and the stages they run. fairseq runs in child processes."""
