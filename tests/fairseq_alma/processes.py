"""A replacement for the fairseq-train processes of a stage, for tests that train nothing."""

from omegaconf import DictConfig, OmegaConf


class NoProcesses:
    """Replaces the processes of a stage: it records their commands and configurations, and each ends with status 1."""

    kind = "cpu"
    memory = None
    num_nodes = 1

    def __init__(self):
        self.commands: list[list[str]] = []
        self.configs: list[DictConfig] = []

    def check_free(self, stage):
        pass

    def num_devices(self, num_jobs):
        return 1

    def run(self, stage, jobs, num_jobs, updates):
        self.commands += [command for command, _ in jobs.values()]
        self.configs += [OmegaConf.load(log.parent / "config.yaml") for _, log in jobs.values()]
        return dict.fromkeys(jobs, 1)
