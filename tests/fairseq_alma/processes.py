"""A replacement for the fairseq-train processes of a stage, for tests that train nothing."""


class NoProcesses:
    """Replaces the fairseq-train processes of a stage: it records the commands, and each ends with status 1."""

    kind = "cpu"

    def __init__(self):
        self.commands: list[list[str]] = []

    def num_devices(self, num_jobs):
        return 1

    def run(self, stage, jobs, num_jobs):
        self.commands += [command for command, _ in jobs.values()]
        return dict.fromkeys(jobs, 1)
