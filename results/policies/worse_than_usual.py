"""Train if the error on the newest mega-batch is above the usual one: an example of a policy of somebody's own."""


def policy(history):
    """Train at the first arrival, and then if the newest known error is above the mean since the last stage."""
    since = history.errors[history.last :]
    return history.last == 0 or since[-1] > sum(since) / len(since)
