"""Stop a command by the signals of a scheduler, as by Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_signals(command: str, what_happens: str) -> Iterator[list[int]]:
    """Context manager in which SIGTERM and SIGUSR1 stop the command like Ctrl-C. What happens then is printed.

    A scheduler such as Slurm sends these signals before a job ends, SIGTERM perhaps several times, so only the first
    signal has an effect. Pressing Ctrl-C a second time stops the command at once. The value of the context manager is a
    list, to which the number of the signal is added when it arrives.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def stop(number: int, _: object) -> None:
        received.append(number)
        for ignored in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if what_happens:
            text = f"{command}: {signal.Signals(number).name}: stopping; {what_happens} (Ctrl-C: stop at once)"
            print(text, file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    # If the command runs in the background of a script, SIGINT is ignored: leave it so.
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    numbers += [] if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else [signal.SIGINT]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
