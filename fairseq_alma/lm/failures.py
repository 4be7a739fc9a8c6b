"""Error messages for training processes that have failed."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit statuses of a process that SIGTERM has ended. The second one is that of a training that saved a checkpoint."""
LOG_TAIL = 20_000
"""Number of characters at the end of a log in which `failure_message` searches for known causes of the failure."""
RANK = re.compile(r"^\[rank\d+\]:\s?")
"""What torch writes before each line of an error message if several processes train a member."""
AFTER_ANOTHER = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|NCCL|gloo|ProcessExitedException")
"""Found in the errors of a process that ends because another process of the same training has ended."""


def failure_message(log: Path, log_size_before: int, status: int, lr: float, batch_size: int, num_members: int) -> str:
    """Return the error message for a failed training process: the last error in its log, and advice.

    Args:
        log: log file of the member.
        log_size_before: size of the log in bytes before the process was started. The text before this is ignored.
        status: exit status of the process, negative if a signal killed it.
        lr: setting `lr` of the run, to which the advice refers.
        batch_size: number of sequences in a forward pass on one device.
        num_members: number of members in the stage.
    """
    text = log.read_bytes()[log_size_before:].decode("utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last_error = _last_error(lines)
    end = text[-LOG_TAIL:]
    if "FloatingPointError" in end:
        advice = f"lower lr={lr}, and add fork=true to continue from this stage"
    elif "No space left" in end or "Disk quota exceeded" in end:
        advice = "free space on the disk and run the same command again to continue"
    elif "out of memory" in end.lower() or "SIGKILL" in end or status == -9:
        advice = (
            f"give a batch_size= below {batch_size} (the size of an update does not change), and add fork=true to "
            f"continue from this stage"
        )
        if num_members > 1:
            advice += ", or train fewer members at the same time (parallel=1)"
        if "out of memory" not in end.lower():
            advice = f"if it was killed for lack of memory, {advice}; otherwise run the same command again to continue"
    elif status in STOPPED and not last_error:
        advice = "run the same command again to continue"
    else:
        advice = "fix the problem that the log reports and run the same command again to continue"
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if status == 128 + signal.SIGTERM:
        ended = "was stopped by signal 15 (SIGTERM)"
    return f"the training process {ended}: {last_error or '(no error line)'}\n  log: {log}\n  what to do: {advice}"


def _last_error(lines: Sequence[str]) -> str:
    """Return the last line of a log that names an error; "" if there is none.

    If several processes train a member, an error of one of them ends the others, too. The errors that this causes are
    returned only if there is no other error. A FloatingPointError is preferred to all others: while fairseq handles it,
    it searches the model for the operation that computed the value, and on a GPU this search can fail.
    """
    lines = [RANK.sub("", line) for line in lines]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line) or "Error" in line.split(":")[0]]
    causes = [line for line in errors if not AFTER_ANOTHER.search(line)]
    not_finite = [line for line in causes if line.startswith("FloatingPointError")]
    return (not_finite or causes or errors or [""])[-1]
