"""Sends the numbers of a run to Weights & Biases (setting `wandb=PROJECT`). A run is one run of W&B, also if it is
continued: RUN/wandb.json has its id, and which numbers were sent already.

All calls of wandb are made in a thread. So a training neither waits for the network nor fails because of W&B: after an
error, one warning is printed, and nothing more is sent.
"""

import logging
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypedDict

from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.printing import say
from fairseq_alma.core.run_folder import RunFolder

logger = logging.getLogger(__name__)

FILE = "wandb.json"
SAVE_SECONDS = 20.0
"""Time between two updates of the file, in seconds. It is longer than wandb keeps numbers in memory, which a kill would
lose. So after a kill, no number is missing, and those of the last moments may be sent twice."""
FINISH_SECONDS = 60.0
"""Maximum time for which the end of a run waits until W&B has received everything, in seconds."""


class _State(TypedDict):
    """The content of RUN/wandb.json."""

    id: str
    project: str
    sent: dict[str, int]
    """Name of each number -> last step at which it was sent."""


_Message = tuple[str, int, Mapping[str, float]]
"""The arguments of `Tracker.log`."""


class Tracker:
    """Sends numbers to one run of W&B, which begins with the first number.

    Args:
        folder: the run folder. W&B keeps its own files there, in the folder `wandb`.
        project: project of W&B.
        config: the settings of the run.
    """

    def __init__(self, folder: str | Path, project: str, config: Mapping[str, Any]):
        self._folder, self._project, self._config = Path(folder).absolute(), project, dict(config)
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        """None is the end."""
        self._thread: threading.Thread | None = None

    def log(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Send numbers. W&B draws them over `axis`. Numbers that were sent before for this or a later step are skipped.

        Args:
            axis: name of the x axis, for example "arrival".
            step: position on this axis.
            values: name -> number. A name always has the same axis.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()
        self._queue.put((axis, step, values))

    def close(self) -> None:
        """Wait until everything is sent, at most FINISH_SECONDS seconds."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(FINISH_SECONDS)
            if self._thread.is_alive():
                _warn(f"W&B has not received all numbers: send them with `wandb sync {self._folder}/wandb/*run-*`")

    def _work(self) -> None:
        try:
            self._send_all()
        except ImportError:
            _warn("wandb is not installed: pip install 'fairseq-alma[tracking]', or leave out wandb=")
        except Exception as error:  # whatever happens in W&B, the run continues
            _warn(f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _send_all(self) -> None:
        path = self._folder / FILE
        state = _State(id=secrets.token_hex(8), project=self._project, sent={})
        if path.exists() and (found := read_json(path, _State))["project"] == self._project:
            state = found
        write_json(path, state, durable=False)
        try:
            run = self._start(state["id"])
        except SystemError:  # Python 3.11 sometimes cannot parse code of a module while another thread parses code, too
            run = self._start(state["id"])
        if not run.offline:
            say(f"W&B: {run.url}", sys.stderr)
        saved, sure, axes = time.monotonic(), dict(state["sent"]), set[str]()
        while True:
            message: _Message | Literal["none yet"] | None
            try:
                message = self._queue.get(timeout=SAVE_SECONDS)
            except Empty:
                message = "none yet"
            if message is None:
                break
            if isinstance(message, tuple):
                axis, step, values = message
                new = {name: value for name, value in values.items() if state["sent"].get(name, -1) < step}
                for name in new.keys() - axes:
                    run.define_metric(name, step_metric=axis)
                axes |= new.keys()
                if new:
                    run.log({axis: step, **new})
                state["sent"] |= dict.fromkeys(new, step)
            if time.monotonic() - saved > SAVE_SECONDS:
                # wandb has stored by now what it had got at the time of the last update.
                write_json(path, {**state, "sent": sure}, durable=False)
                saved, sure = time.monotonic(), dict(state["sent"])
        run.finish()
        write_json(path, state, durable=False)

    def _start(self, identity: str) -> Any:
        """Begin or continue the run of W&B, and return it."""
        import wandb  # here, because the import takes seconds

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("not logged in: give `wandb login`, or set WANDB_MODE=offline")
        is_seed = RunFolder(self._folder).is_of_one_of_several_seeds
        return wandb.init(
            project=self._project,
            id=identity,
            resume="allow",
            name="/".join(self._folder.parts[-1 - is_seed :]),
            group=self._folder.parent.name if is_seed else None,
            config=self._config,
            allow_val_change=True,  # a continued run may have other paths and devices, and a fork other settings
            dir=self._folder,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )


def _warn(text: str) -> None:
    logger.warning("the run continues, but its numbers are no longer sent to W&B: %s", text)
