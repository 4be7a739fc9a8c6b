"""The default of `out=`, the command of a job, units of FLOPs, and what a settings class says about several errors."""

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from fairseq_alma.app.arguments import TextSettings, check_out, default_out, job_arguments, name_and_value
from fairseq_alma.app.command import setting_values
from fairseq_alma.app.tables import flops_unit
from fairseq_alma.core import provenance
from fairseq_alma.core.errors import SettingError
from fairseq_alma.lm.settings import LanguageModelSettings
from vision.presets import CONFIGS
from vision.settings import VisionSettings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "runs/digits/default"),
        (["wait=10", "dataset=mnist", "learner=ens"], "runs/mnist/learner=ens,wait=10"),
        (["dataset=/data/my photos/", "device=cpu", "arrivals=3"], "runs/my_photos/default"),
        (["backbone=torchvision.models:resnet18"], "runs/digits/backbone=torchvision.models_resnet18"),
        (["-m", "dataset=mnist", "wait=1,10"], "runs/mnist/sweep"),
    ],
)
def test_the_default_folder_of_a_run_of_images(arguments, expected):
    assert default_out(arguments, VisionSettings, "dataset", ()) == expected


def test_the_default_folder_of_a_language_model():
    words = ["stream=streams/books", "learner=gmoe", "grow_experts=[2,2,4]", "launch=slurm", "launch.time=10"]
    assert (
        default_out(words, LanguageModelSettings, "stream", ["launch"]) == "runs/books/grow_experts=2_2_4,learner=gmoe"
    )


def test_a_long_name_is_cut_and_stays_different():
    names = [default_out([f"plugin={'x' * 300}{end}"], VisionSettings, "dataset", ()) for end in "ab"]
    assert names[0] != names[1]
    assert max(len(Path(name).name) for name in names) < 200


def test_a_prefix_of_hydra_is_no_part_of_a_name():
    assert name_and_value("++wait=1") == ("wait", "1")
    assert name_and_value("+launch.time=a=b") == ("launch.time", "a=b")
    assert name_and_value("-m") is None


def test_a_folder_that_cannot_be_created_is_refused_and_one_that_can_is_not_left(tmp_path):
    with pytest.raises(SettingError, match="out=/proc/x cannot be created"):
        check_out("/proc/x", "runs/x")
    check_out(f"{tmp_path}/a/b", "runs/x")
    assert not any(tmp_path.iterdir())


def test_an_out_that_is_a_dangling_link_is_refused_by_name(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for out in (tmp_path / "link", tmp_path / "link/run"):
        with pytest.raises(SettingError, match=f"{tmp_path}/link is a link to {tmp_path}/gone, which does not exist"):
            check_out(str(out), "runs/x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SettingError, match="loop is a link to"):
        check_out(f"{tmp_path}/loop/run", "runs/x")


ODD = [
    "r/Zürich", "写真", "a#1", "a & b", "a,b", "it's", 'say "x"', "a=b", "[a]", "{a: b}", "(a)", "a\\b", "a\\'", " a",
    "a\nb", "$HOME", "${x}", "\\${", "~/x", "-x", "1", "true", "", "x" * 300,
]  # fmt: skip
MORE_ODD = [
    "Fotos für Müller", "/home/josé/x", "🙂", "e\u0301", "a;b", "'x' or \"y\"", "f(x)", "glob(*)", "a\\", "\\", "a\\,b",
    "a ", "a\tb", "${", "a${b", "$", "~", "+x", "@x", "a:b", "hf:a/b", "100%", "007", "1e3", "nan", "a|b", "*.npz", "?",
    "!", "<x>", "^", "`x`", "a//b", ".", "..",
]  # fmt: skip
"""Texts that a path or another setting may have. The slow suite has more of each kind."""
TEXTS = TextSettings({"dataset", "out", "launch.setup"}, {"learner", "dataset"})


def read_by_hydra(*words: str, name: str = "dataset") -> object:
    """Return the value of a setting after Hydra and OmegaConf have read the command line."""
    with initialize_config_dir(str(CONFIGS), version_base="1.1"):
        return setting_values(compose("alma_vision", overrides=[*words, *(["out=x"] if name != "out" else [])]))[name]


@pytest.mark.parametrize("text", [*ODD, *(pytest.param(text, marks=pytest.mark.slow) for text in MORE_ODD)])
def test_a_text_is_taken_as_it_is_typed(text):
    word = TEXTS.for_hydra(f"dataset={text}", in_sweep=False)
    assert read_by_hydra(word) == text
    assert TEXTS.texts(word) == [text]
    assert TEXTS.as_typed(word) == f"dataset={text}"
    # In a sweep, what is typed in quotes is one text.
    swept = TEXTS.for_hydra(word, in_sweep=True)
    assert swept == word or read_by_hydra(swept) == text or "," not in text


@pytest.mark.parametrize(
    ("typed", "texts"),
    [
        ("mnist,cifar10", ["mnist", "cifar10"]),
        ("Zürich,'a,b',\"c, d\",it's", ["Zürich", "a,b", "c, d", "it's"]),
        ("a b, c", ["a b", " c"]),
        ("choice(a,b)", ["a", "b"]),
        ("[a,b]", ["[a", "b]"]),
        ("1,2", ["1", "2"]),
    ],
)
def test_in_a_sweep_a_comma_separates_texts_unless_it_is_in_quotes(typed, texts):
    assert TEXTS.texts(TEXTS.for_hydra(f"dataset={typed}", in_sweep=True)) == texts


def test_a_comma_in_what_all_jobs_of_a_sweep_ask_for_separates_nothing():
    setup = "module load cuda,gcc"
    assert TEXTS.texts(TEXTS.for_hydra(f"launch.setup={setup}", in_sweep=True)) == [setup]


def test_a_name_that_hydra_can_read_gets_no_quotes_because_the_folders_of_a_sweep_are_named_after_it():
    for word in ("dataset=mnist,/data/a-b_c.npz", "out=runs/x", "wait=1,10", "dataset=null", "dataset='a b'", "-m"):
        assert TEXTS.for_hydra(word, in_sweep=True) == word


def test_a_reference_to_a_setting_or_variable_is_replaced_and_can_be_escaped(monkeypatch):
    monkeypatch.setenv("CITY", "Zürich")
    word = TEXTS.for_hydra("out=r/${dataset}/${oc.env:CITY}, ü", in_sweep=False)
    assert read_by_hydra(word, "dataset=mnist", name="out") == "r/mnist/Zürich, ü"
    assert TEXTS.texts(word) == []
    assert read_by_hydra(TEXTS.for_hydra("out=r/\\${dataset}", in_sweep=False), name="out") == "r/${dataset}"
    setup = "export X=${HOME} dataset=${dataset}"  # for the shell
    assert TEXTS.texts(TEXTS.for_hydra(f"launch.setup={setup}", in_sweep=False)) == [setup]


def test_the_command_of_a_job_names_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job_arguments(["wait=1", "out=sweep"], tmp_path / "sweep/wait=1") == ["wait=1", "out=sweep/wait=1"]
    assert job_arguments(["wait=1"], Path("/elsewhere/x")) == ["wait=1", "out=/elsewhere/x"]


@pytest.mark.parametrize(
    ("flops", "unit"), [([], "MFLOP"), ([5], "MFLOP"), ([2e6, 3e9], "GFLOP"), ([1e12], "TFLOP"), ([9e18], "PFLOP")]
)
def test_the_largest_cost_is_at_least_one_in_its_unit(flops, unit):
    assert flops_unit(flops)[0] == unit


def test_provenance_shows_what_differed_from_the_commit(tmp_path, monkeypatch):
    """In a repository with a committed file, only changes of source files make the commit dirty."""
    source = tmp_path / "fairseq_alma/core/provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "first"]):
        os.spawnlp(os.P_WAIT, "git", "git", "-C", str(tmp_path), *words)
    monkeypatch.setattr(provenance, "__file__", str(source))
    commit = provenance._commit.__wrapped__
    (tmp_path / "results").mkdir()
    (tmp_path / "results/new.txt").write_text("b")
    clean = commit()
    assert list(clean) == ["commit"] and len(clean["commit"]) == 12
    source.write_text("a = 2\n")
    dirty = commit()
    assert dirty["commit"] == f"{clean['commit']}-dirty"
    assert dirty["uncommitted"]["files"] == [" M fairseq_alma/core/provenance.py"]
    assert "-a = 1\n+a = 2" in dirty["uncommitted"]["difference"]


def test_several_errors_are_one_message():
    with pytest.raises(SettingError) as error:
        LanguageModelSettings.from_mapping({"stream": None, "out": "", "lr": -1, "wait": "x", "experts": 2.5})
    assert str(error.value).splitlines()[0] == "6 errors:"
    assert [line.partition("=")[0] for line in str(error.value).splitlines()[1:]] == [
        "- stream", "- out", "- experts", "- give exactly one of updates", "- lr", "- wait",
    ]  # fmt: skip
