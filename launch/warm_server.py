"""What the server of `launch.warm` does before it forks. Only the server imports this module."""

import gc
import importlib
import os
import signal
from contextlib import suppress

from launch import warm

gc.disable()  # While modules are imported, garbage collections find nothing and take a fifth of the time.
if warm.MODULES not in os.environ:  # Python has started the server again, because it was killed
    os._exit(1)
# Slurm sends SIGTERM to all processes of a job. The server must outlive its forks, to pass on their exit statuses. A
# signal that is blocked is not lost if it arrives just after the fork.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
# What libraries say at import is not for the user.
outputs = [os.dup(number) for number in (1, 2)]
with open(os.devnull, "w") as nothing:
    for number in (1, 2):
        os.dup2(nothing.fileno(), number)
for module in os.environ[warm.MODULES].split():
    # A fork that needs the module imports it again, and reports the error.
    with suppress(Exception):
        importlib.import_module(module)
for number, output in zip((1, 2), outputs, strict=True):
    os.dup2(output, number)
    os.close(output)
# A process with several threads is not safe to fork.
if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
    os._exit(1)
gc.enable()
gc.collect()
# Otherwise, the first garbage collection in a fork would write to all objects, and so copy the memory of the server.
gc.freeze()
