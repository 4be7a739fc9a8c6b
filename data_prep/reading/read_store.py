"""Keep the results of finished reading tasks, so that they are used again instead of reading the sources again.

A reading task (`spool.SpoolTask`) is found by its description, which contains everything that the result depends on:
the paths, sizes and modification times of the input files, the parts of the files, the cleaning, and the versions of
the libraries and of the reading code.

alma-prep uses two stores. The work folder contains one, so that a call with changed settings continues with the text
that an earlier call has read. The other one is the folder that the option --cache names.
"""

import hashlib
import json
import shutil
from dataclasses import replace

from data_prep.reading.spool import SpoolTask
from data_prep.running.task_list import read_all_tasks
from data_prep.running.task_store import TaskStore
from data_prep.running.tasks import Step


class ReadStore(TaskStore):
    """The results of finished reading tasks, in a folder."""

    def keys(self, task: SpoolTask) -> list[str]:
        # A result with signatures also serves a task without: the signatures are not read.
        tasks = [task] if task.sign else [task, replace(task, sign=True)]
        return [hashlib.sha256(_without_paths(each).description().encode()).hexdigest() for each in tasks]


def _without_paths(task: SpoolTask) -> SpoolTask:
    """Return the task without the paths of the files that the cleaning uses. Their digests stay.

    So the result is found also if the list of URLs has been moved, or the file with repeated paragraphs is in the work
    folder of another stream.
    """
    cleaning = task.cleaning
    if cleaning is None:
        return task
    block_urls = ("", *cleaning.block_urls[1:]) if cleaning.block_urls else ()
    paragraphs = ("", *cleaning.paragraphs[1:]) if cleaning.paragraphs else ()
    return replace(task, cleaning=cleaning._replace(block_urls=block_urls, paragraphs=paragraphs))  # type: ignore[arg-type]


def keep_finished(step: Step, store: ReadStore) -> None:
    """Move the finished tasks of an earlier call into a store, if the tasks of this call are others.

    Args:
        step: the reading step of this call. Its folder may contain tasks of an earlier call.
        store: the store.
    """
    try:
        earlier = Step(step.folder, [_task(json.loads(line)) for line in read_all_tasks(step.folder)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # There are no tasks, or they are of an earlier release, which described tasks in another way.
        return
    if list(earlier.tasks) == list(step.tasks):
        return
    for number in range(len(earlier.tasks)):
        store.put(earlier, number)
    shutil.rmtree(step.folder)


def _task(description: dict) -> SpoolTask:
    """Return the reading task with this description."""
    return SpoolTask.from_fields({name: value for name, value in description.items() if name != "class"})
