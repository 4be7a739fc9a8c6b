"""Options are declared once: the parser, the recorded command and the identity agree."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from data_prep.cleaning.cleaner import Cleaning
from data_prep.cli import _parser
from data_prep.dividing.partition import CutTask
from data_prep.reading.spool import SpoolTask
from data_prep.settings import PrepSettings, usable_cores
from data_prep.settings.cluster import Cluster
from data_prep.settings.options import options_of, parsed_settings
from data_prep.sources import Part, Source


def settings_of(argv):
    """The settings that a command line gives."""
    parsed = _parser().parse_args(argv)
    sources = tuple(map(Source.parse, parsed.source))
    return PrepSettings(
        out=parsed.out,
        sources=sources,
        cluster=Cluster(**parsed_settings(parsed, Cluster)),
        **parsed_settings(parsed, PrepSettings),
    )


def test_defaults_of_the_command_line_are_those_of_the_settings():
    source = Source("python-docs")
    assert settings_of(["o", "--source", "python-docs", "--mega-batches", "2"]) == PrepSettings("o", (source,), 2)


@pytest.mark.parametrize(
    "command",
    [
        "alma-prep o --source python-docs --mega-batches 2 --vocab-size 50000 --seed 0",
        "alma-prep o --source text:a@0.5 --source 'books:my books' --mega-batches 2 --vocab-size 300 --seed 7 "
        "--tokenizer sentencepiece --tokenizer-words 2000 --valid-words 9 --valid-source text --passage-words 5 "
        "--language en --gopher off --duplicates exact --text-field body --max-bad 0.5",
        "alma-prep o --source text:a --source text:b --vocab-size 50000 --seed 0 --partition as-given",
        "alma-prep o --source text:a --mega-batches 2 --vocab-size 50000 --seed 0 --decontaminate 13 "
        "--decontaminate-against quiz.jsonl --decontaminate-against 'my quiz.txt'",
        "alma-prep --extend o --source text:a",
        "alma-prep --extend o --source text:a --mega-batches 3 --passage-words 9",
    ],
)
def test_a_command_is_recorded_as_it_was_given(command):
    assert settings_of(shlex.split(command)[1:]).command() == command


def test_where_it_runs_is_neither_recorded_nor_part_of_the_identity():
    argv = ["o", "--source", "python-docs", "--mega-batches", "2"]
    elsewhere = ["--workers", "3", "--executor", "slurm", "--slurm-time", "01:00:00"]
    assert settings_of(argv + elsewhere).command() == settings_of(argv).command()
    assert settings_of(argv + elsewhere).identity() == settings_of(argv).identity()
    assert settings_of([*argv, "--max-bad", "0.5"]).identity() == settings_of(argv).identity()
    assert settings_of([*argv, "--seed", "5"]).identity() == settings_of(argv).identity() | {"seed": 5}


def test_the_identity_has_the_keys_that_streams_record():
    assert list(settings_of(["o", "--source", "python-docs", "--mega-batches", "2"]).identity()) == [
        "sources", "num_mega_batches", "vocab_size", "seed", "tokenizer", "tokenizer_words", "valid_words",
        "valid_source", "passage_words", "partition", "test_words", "period", "causal", "late", "language", "gopher",
        "filters", "duplicates", "decontaminate", "decontaminate_against", "text_field", "id_field", "date_field",
    ]  # fmt: skip


def test_every_option_says_in_help_what_it_does():
    text = _parser().format_help()
    for option in [*options_of(PrepSettings).values(), *options_of(Cluster).values()]:
        assert option.flag in text
        assert len(option.help) > 20


CLEANING = Cleaning("en", True, (("my_filters:f", "0f"),))


@pytest.mark.parametrize(
    "task",
    [
        SpoolTask([Part("text", "/a/b", "b", 0, 9, (("text_field", "text"),))], CLEANING, "0f", "1e", True, True),
        SpoolTask([Part("text", "/a/b", "b", 0, 9)], None, "0f", "1e", False, False),
        CutTask("spool", 5, (1, 2, 3, 4), "long.npy", "0f", 0, 7),
    ],
)
def test_a_task_survives_its_way_through_json(task):
    fields = json.loads(task.description())
    assert fields.pop("class") == f"{type(task).__module__}:{type(task).__name__}"
    again = type(task).from_fields(fields)
    assert again == task
    assert again.description() == task.description()


CORES = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from data_prep.settings import *; "


@pytest.mark.skipif(sys.platform != "linux", reason="CPU affinity")
def test_workers_are_as_many_as_the_cores_that_the_process_may_use():
    settings = settings_of(["o", "--source", "python-docs", "--mega-batches", "2"])
    assert settings.workers == len(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", CORES + "print(default_workers('local'))"], capture_output=True)
    assert done.stdout == b"1\n"


def test_inside_a_slurm_job_workers_are_as_many_as_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "6")  # without a job, the variable means nothing
    assert usable_cores() == 96
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert usable_cores() == 6
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert usable_cores() == 3


def test_on_a_cluster_the_cores_of_the_login_node_do_not_count():
    argv = ["o", "--source", "python-docs", "--mega-batches", "2"]
    assert settings_of([*argv, "--executor", "slurm"]).workers == 64
    assert settings_of([*argv, "--executor", "slurm", "--workers", "5"]).workers == 5
    with pytest.raises(ValueError, match="check its quotation marks"):
        settings_of([*argv, "--slurm-options=--account='x"])
