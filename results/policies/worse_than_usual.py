"""Train if the newest known error is clearly above the usual one: an example of a policy of your own."""


def policy(history):
    """Train at the first arrival, and then if the newest known error is 5% above the mean since the last stage."""
    since = history.errors[history.last :]
    return history.last == 0 or since[-1] > 1.05 * sum(since) / len(since)
