"""Tasks that misbehave. The jobs of a Slurm import them from this module."""

import dataclasses
import os
import signal
import time
from pathlib import Path

from data_prep.errors import Passing, PrepError
from data_prep.running.tasks import Task


@dataclasses.dataclass(frozen=True)
class Misbehave(Task):
    """Write the number of the task. First, do something else on each of the first `times` starts."""

    number: int
    starts: str
    """File to which each start of the task appends a line."""
    what: str = "nothing"
    times: int = 0
    seconds: float = 0.0

    def run(self, prefix, heartbeat):
        heartbeat.beat(f"input_{self.number}.txt")
        with open(self.starts, "a") as file:
            file.write(f"{self.number}\n")
        if Path(self.starts).read_text().splitlines().count(str(self.number)) <= self.times:
            if self.what == "hang":
                time.sleep(600)
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "refuse":
                raise PrepError("this text cannot be used")
            if self.what == "wait":
                raise Passing("the server is busy")
            if self.what == "fill":
                raise OSError("8 requested and 4 written")  # as NumPy does
            if self.what == "fail":
                raise ValueError("the weather is bad")
        time.sleep(self.seconds)
        prefix.with_name(f"{prefix.name}.txt").write_text(str(self.number))
        return {"number": self.number}
