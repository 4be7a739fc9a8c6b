"""The fairseq task alma_lm (alma_lm.py) and its check that losses are finite (loss_check.py)."""
