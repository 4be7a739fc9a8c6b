"""Checks of commands that a test cannot run: parse them and compose their settings."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from fairseq_alma.app.command import setting_values, slurm_settings
from tests.commands import ROOT

SCRIPTS = Path(sys.executable).parent
PARSED = (
    "alma-deploy", "alma-prep", "alma-report", "alma-eval", "alma-export", "alma-forget", "alma-generate", "alma-grow",
    "alma-import",
)  # fmt: skip
"""Commands whose options argparse reads: `--help` must name each long option."""


def environment() -> dict[str, str]:
    """Return the environment in which a user types commands: our scripts are on the path."""
    return {**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}


def command_lines(text: str) -> list[list[str]]:
    """Return the commands of a block, each as a list of words. Comments and continued lines are understood."""
    text = re.sub(r"\\\n\s*", " ", text)
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def check_block(text: str) -> int:
    """Check every command of a block; return how many were checked. Raises AssertionError, or what composing raises."""
    subprocess.run(["bash", "-n", "-c", text], check=True)
    checked = 0
    for words in command_lines(text):
        name, arguments = words[0], words[1:]
        if name in ("alma-lm", "alma-vision"):
            if arguments[0] in ("status", "logs", "cancel"):
                continue
            check_settings(name, arguments)
        elif name == "sbatch":
            check_sbatch(arguments)
        elif name in PARSED:
            check_options(name, arguments)
        elif name == "python":
            assert (ROOT / arguments[0]).is_file(), f"{arguments[0]} does not exist"
        else:
            continue
        checked += 1
    return checked


def check_settings(name: str, arguments: list[str]) -> None:
    """Compose the settings of `alma-lm` or `alma-vision`, of every job of a sweep, and make them."""
    if name == "alma-lm":
        from fairseq_alma.lm.run import CONFIGS, OTHER_KEYS
        from fairseq_alma.lm.settings import LanguageModelSettings

        def make(config, typed):
            return LanguageModelSettings.from_mapping(setting_values(config, OTHER_KEYS), typed)
    else:
        from vision.cli import CONFIGS, settings_of

        def make(config, typed):
            return settings_of(setting_values(config), typed)

    overrides = [word for word in arguments if word not in ("-m", "--multirun")]
    jobs = jobs_of(overrides) if len(overrides) < len(arguments) else [overrides]
    for job in jobs:
        with initialize_config_dir(str(CONFIGS.absolute()), version_base="1.1"), pytest.MonkeyPatch.context() as patch:
            if name == "alma-vision":
                # If this process has imported fairseq, Hydra reads optimizer=NAME as the choice of one of its files.
                # The command alma-vision never imports fairseq.
                patch.delitem(ConfigStore.instance().repo, "optimizer", raising=False)
            config = compose(name.replace("-", "_"), job)
            slurm_settings(config)
            make(config, {word.split("=")[0] for word in job if not word.startswith("launch")})


def jobs_of(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep."""
    choices = []
    for override, parsed in zip(overrides, OverridesParser.create().parse_overrides(overrides), strict=True):
        if parsed.is_sweep_override():
            choices.append([f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()])
        else:
            choices.append([override])
    return [list(job) for job in product(*choices)]


def check_sbatch(arguments: list[str]) -> None:
    """Check the script of an sbatch line, that bash can read it, and the command that it runs with these arguments.

    If the line has a command (--wrap) instead of a script, check the command.
    """
    wrapped = [word.removeprefix("--wrap=") for word in arguments if word.startswith("--wrap=")]
    if wrapped:
        assert check_block(wrapped[0]) == 1
        return
    position = next(number for number, word in enumerate(arguments) if not word.startswith("-"))
    script, *given = arguments[position:]
    assert (ROOT / script).is_file(), f"{script} does not exist"
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    *_, line = (ROOT / script).read_text().splitlines()
    printing = line.replace("exec", "printf '%s\\n'", 1)
    run = subprocess.run(["bash", "-c", printing, script, *given], capture_output=True, text=True, check=True)
    assert check_block(shlex.join(run.stdout.splitlines())) == 1


def check_options(name: str, arguments: list[str]) -> None:
    """Check that a command's help names every long option of a line."""
    for word in arguments:
        if word.startswith("--"):
            assert word.split("=")[0] in help_text(name), f"{name} has no option {word}"


@cache
def help_text(name: str) -> str:
    """Return what a command prints for `--help`."""
    return subprocess.run(
        [str(SCRIPTS / name), "--help"], capture_output=True, text=True, check=True, env=environment()
    ).stdout
