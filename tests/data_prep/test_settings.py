"""Options are declared once: the parser, the recorded command and the identity agree."""

import json
import shlex

import pytest

from data_prep.cli import _parser
from data_prep.options import options_of, parsed_settings
from data_prep.settings import Cluster, PrepSettings
from data_prep.sources import Part, Source
from data_prep.spool import CutTask, SpoolTask


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
    elsewhere = ["--workers", "3", "--stall-seconds", "9", "--executor", "slurm", "--slurm-time", "01:00:00"]
    assert settings_of(argv + elsewhere).command() == settings_of(argv).command()
    assert settings_of(argv + elsewhere).identity() == settings_of(argv).identity()
    assert settings_of([*argv, "--max-bad", "0.5"]).identity() == settings_of(argv).identity()
    assert settings_of([*argv, "--seed", "5"]).identity() == settings_of(argv).identity() | {"seed": 5}


def test_the_identity_has_the_keys_that_streams_record():
    assert list(settings_of(["o", "--source", "python-docs", "--mega-batches", "2"]).identity()) == [
        "sources", "num_mega_batches", "vocab_size", "seed", "tokenizer", "tokenizer_words", "valid_words",
        "valid_source", "passage_words", "partition", "language", "gopher", "duplicates", "decontaminate",
        "decontaminate_against", "text_field", "id_field", "date_field",
    ]  # fmt: skip


def test_every_option_says_in_help_what_it_does():
    text = _parser().format_help()
    for option in [*options_of(PrepSettings).values(), *options_of(Cluster).values()]:
        assert option.flag in text
        assert len(option.help) > 20


@pytest.mark.parametrize(
    "task",
    [
        SpoolTask(0, 1, 2, [(Part("text", "/a/b", "b", 0, 9, (("text_field", "text"),)), 3)], ("en", True), True, "0f"),
        SpoolTask(0, 1, 2, [(Part("text", "/a/b", "b", 0, 9), 3)], None, False, "0f"),
        CutTask("spool", 5, (1, 2, 3, 4), "long.npy", "0f", 0, 7),
    ],
)
def test_a_task_survives_its_way_through_json(task):
    fields = json.loads(task.description())
    assert fields.pop("class") == f"data_prep.spool:{type(task).__name__}"
    again = type(task).from_fields(fields)
    assert again == task
    assert again.description() == task.description()
