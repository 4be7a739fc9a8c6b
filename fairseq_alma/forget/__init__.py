"""Remove a document from a stream and from the models that were trained on it; `cli` is the command alma-forget.

The text is masked in place: its tokens become padding, in files of the same size, so that no other token moves. Padding
is not trained on, not scored, and not attended to (`models.switch_lm`). Runs are taken back to the stage before the
first use of the text, and trained again on the masked stream.

    find            where a document, its passages and its near copies are in a stream
    mask            the plan of what is masked, and its execution
    runs            which runs have used the text, what it costs to train them again, and the training
    traces          what still contains the text, or has learned from it

STREAM/forgotten/unfinished.json    the plan, while the stream is being masked: no other command reads such a stream
STREAM/forgotten/1.json             the certificate of the first call: what was masked and trained again, with digests.
                                    It is written before each step, so that the same command continues if killed
"""
