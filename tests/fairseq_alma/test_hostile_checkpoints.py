"""A checkpoint of somebody else runs no code: every entry point, with every kind of hostile configuration.

The code would create a file, the canary. fairseq itself runs it: it makes the classes that a configuration names,
imports `user_dir`, and passes options such as `decoder_layers` of fconv_lm to eval(). The campaigns here are over all
architectures that fairseq knows, over all options of our model, and over all other names in a configuration.
"""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from fairseq_alma.checkpoints import BEST, LAST, num_updates, read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import SettingError, StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.cli import main as alma_eval
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.growth.checkpoint import main as alma_grow
from fairseq_alma.lm.fairseq_config import member_config, write_untrained_checkpoint
from fairseq_alma.models.switch_lm import SwitchLanguageModelConfig
from tests.fairseq_alma.lm.test_learners import train_member_in_a_fork
from tests.fairseq_alma.lm.test_train_member import prepared

SMALL = ("--decoder-layers 2 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8 --decoder-attention-heads 2 "
         "--learned-positions 32")  # fmt: skip
STRINGS_THAT_FAIRSEQ_EVALUATES = (
    "decoder_layers", "decoder_attention", "encoder_layers", "encoder_attention", "self_attention", "project_input",
    "gated_attention", "downsample", "pretrained", "character_filters", "conv_feature_layers", "conv_aggregator_layers",
)  # fmt: skip
OPTIONS = [name for name in vars(SwitchLanguageModelConfig()) if name not in ("_name", "tokens_per_sample")]


@pytest.fixture(scope="module")
def small(stream, tmp_path_factory) -> dict:
    """The content of a checkpoint of a small switch_lm model."""
    path = tmp_path_factory.mktemp("small") / "small.pt"
    values = {"data": stream, "arch": "switch_lm_tiny", "tokens_per_sample": 32, "total_num_update": 2}
    write_untrained_checkpoint(member_config(values, SMALL), path)
    return torch.load(path, weights_only=True)


@pytest.fixture
def canary(tmp_path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def payload(canary) -> str:
    return f"__import__('pathlib').Path({str(canary)!r}).touch()"


@pytest.fixture
def user_dir(tmp_path, canary) -> Path:
    """A folder that creates the canary when it is imported."""
    folder = tmp_path / "evil_user_dir"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    return folder


class Entries:
    """All functions of ours that make a model of a checkpoint, or change it."""

    def __init__(self, stream, tmp_path, capsys):
        self.stream, self.path, self.grown, self.capsys = stream, tmp_path / "given.pt", tmp_path / "grown.pt", capsys
        self.run = tmp_path / "foreign_run"
        self.run.mkdir()
        (self.run / "settings.json").write_text(json.dumps({"stream": str(stream)}))
        (self.run / "predictor.json").write_text(json.dumps({"checkpoints": [{"path": "../given.pt"}]}))

    def messages(self, state) -> dict[str, str]:
        """Return the one line that each command prints, "" if it ends with status 0. Other errors are not caught."""
        torch.save(state, self.path)
        self.grown.unlink(missing_ok=True)
        files, to_grow = ["--stream", str(self.stream)], [str(self.path), str(self.grown)]
        found = {}
        for name, command, arguments in (
            ("alma-eval CHECKPOINT", alma_eval, [str(self.path), *files]),
            ("alma-eval RUN", alma_eval, [str(self.run)]),
            ("alma-grow --experts", alma_grow, [*to_grow, "--experts", "1"]),
            ("alma-grow --layers", alma_grow, [*to_grow, "--layers", "2"]),
            ("alma-grow --copy-experts-by gradient", alma_grow,
             [*to_grow, "--experts", "1", "--copy-experts-by", "gradient", *files]),
        ):  # fmt: skip
            status = command(arguments)
            printed = self.capsys.readouterr().err
            assert status == (2 if printed else 0), (name, status, printed)
            assert printed.count("\n") <= 1, printed
            found[name] = printed
        # What a training does with the checkpoint from which it starts, apart from its weights.
        checkpoint_utils.load_checkpoint_to_cpu(str(self.path))
        return found


@pytest.fixture
def entries(stream, tmp_path, capsys) -> Entries:
    return Entries(stream, tmp_path, capsys)


def with_model(small, **options) -> dict:
    """Return the checkpoint with changed options of the model. The weights are shared."""
    return {**small, "cfg": {**small["cfg"], "model": {**small["cfg"]["model"], **options}}}


def test_the_reported_checkpoint_runs_no_code(small, entries, canary, payload):
    state = with_model(small, _name="fconv_lm", decoder_layers=payload)
    said = entries.messages(state)
    assert not canary.exists()
    for name in ("alma-eval CHECKPOINT", "alma-eval RUN"):
        assert f"{entries.path.name} is a checkpoint of fconv_lm, which is not one of our architectures" in said[name]
    assert 'given.pt has decoder_layers="__import__(' in said["alma-grow --experts"]
    assert "expected an integer, 1 or more" in said["alma-grow --layers"]


def test_no_architecture_of_fairseq_is_made(small, stream, tmp_path, canary, payload, entries):
    hostile = dict.fromkeys(STRINGS_THAT_FAIRSEQ_EVALUATES, payload)
    ours = ["switch_lm", *ARCH_MODEL_INV_REGISTRY["switch_lm"]]
    foreign = sorted({*ARCH_MODEL_NAME_REGISTRY, *MODEL_DATACLASS_REGISTRY} - {*ours})
    assert len(foreign) > 100
    folder = StreamFolder.open(stream)
    for name in foreign:
        state = with_model(small, _name=name, **hostile)
        torch.save(state, entries.path)
        with pytest.raises(StreamError, match=f"given.pt is a checkpoint of {name[:12]}"):
            load_member(entries.path, folder, torch.device("cpu"))
        with pytest.raises((StreamError, SettingError)):  # also if the user names it
            load_member(entries.path, folder, torch.device("cpu"), name)
        assert not canary.exists(), name
    for name in ours:
        torch.save(with_model(small, _name=name), entries.path)
        load_member(entries.path, folder, torch.device("cpu"))


HOSTILE_VALUES = [
    "payload", None, math.nan, math.inf, -1, 10**12, 10**30, [1], {"_target_": "os.system", "command": "id"},
    "${oc.env:HOME}", "1", b"1", (1, 2), {"_name": "adam"},
]  # fmt: skip


@pytest.mark.parametrize(
    "option",
    [*OPTIONS[::3], *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS if one not in OPTIONS[::3])],
)
def test_a_hostile_value_of_any_option_is_refused_by_its_name(small, stream, entries, canary, payload, option):
    folder = StreamFolder.open(stream)
    for value in HOSTILE_VALUES:
        value = payload if value == "payload" else value
        if option == "expert_parallel" and value in (10**12, 10**30):
            continue  # valid numbers, and experts are never spread to evaluate a checkpoint
        if option == "compile_batch" and value in (10**12, 10**30):
            continue  # valid numbers, and nothing is compiled to evaluate a checkpoint
        torch.save(with_model(small, **{option: value}), entries.path)
        with pytest.raises(SettingError, match=f"given.pt.*{option.replace('_', '[-_]')}"):
            load_member(entries.path, folder, torch.device("cpu"))
        assert alma_grow([str(entries.path), str(entries.grown), "--experts", "1"]) == 2
        # Growth makes no model, so the number of heads may be any integer.
        is_number_of_heads = option == "decoder_attention_heads" and value in (10**12, 10**30)
        assert option in entries.capsys.readouterr().err or is_number_of_heads
        assert not canary.exists(), value


def test_other_groups_of_the_configuration_choose_nothing(small, entries, canary, payload, user_dir, stream):
    """They name folders, tasks, criteria and optimizers. The checkpoint is scored all the same."""
    expected = load_member(write(small, entries.path), StreamFolder.open(stream), torch.device("cpu"))[0].state_dict()
    cfg = small["cfg"]
    groups = [
        {"common": {**cfg["common"], "user_dir": str(user_dir)}},
        {"common": {"user_dir": str(user_dir), "_target_": "os.system"}},
        {"task": {**cfg["task"], "data": payload, "user_dir": str(user_dir)}},
        *({"task": {**cfg["task"], "_name": name}} for name in TASK_REGISTRY),
        {"optimizer": {"_name": "adam", "adam_betas": payload, "lr": [payload]}},
        {"lr_scheduler": {"_name": "manual", "epoch2lr": payload}},
        {"criterion": {"_name": "ctc", "wer_args": payload}},
        *({name: {"_name": payload}} for name in REGISTRIES),
        {"generation": {"_target_": "os.system", "command": payload}},
        {"hydra": {"callbacks": {"evil": {"_target_": "os.system", "command": payload}}}},
        {"model_overrides": payload, "evaluation": "${oc.decode:'" + payload + "'}"},
    ]
    assert len(groups) > 30
    for group in groups:
        state = {**small, "cfg": {**cfg, **group}}
        model, task = load_member(write(state, entries.path), StreamFolder.open(stream), torch.device("cpu"))
        assert type(task).__name__ == "AlmaLanguageModelingTask"
        assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
        assert not canary.exists(), group
    said = entries.messages({**small, "cfg": {**cfg, **groups[0]}})
    assert said["alma-eval RUN"] == "" and not canary.exists()


def write(state, path) -> Path:
    torch.save(state, path)
    return path


def test_what_is_no_checkpoint_of_ours_is_refused_in_one_line(small, entries, canary):
    def changed(*keys, value):
        state = {**small, "cfg": copy.deepcopy(small["cfg"]), "model": dict(small["model"])}
        entry = state
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = value
        return state

    embedding = "decoder.embed_tokens.weight"
    cases = [
        [], {}, [1, 2], {"cfg": None}, {"model": {}}, {"cfg": {"model": {}}, "model": {}},
        changed("cfg", value=[1]), changed("cfg", "model", value="switch_lm"), changed("model", value=[torch.ones(2)]),
        changed("cfg", "task", value=None), changed("cfg", "task", "tokens_per_sample", value="${oc.env:HOME}"),
        changed("cfg", "task", "tokens_per_sample", value=10**12), changed("cfg", "model", "_name", value=["a"]),
        changed("model", embedding, value="weights"), changed("model", embedding, value=torch.ones(24)),
        changed("model", embedding, value=torch.ones(24, 8, dtype=torch.int64)),
        # A file of a few bytes that would need terabytes.
        changed("model", embedding, value=torch.ones(1).expand(24, 10**11)),
        changed("model", embedding, value=torch.empty(24, 10**11, device="meta")),
        changed("model", embedding, value=torch.eye(24).to_sparse()),
        changed("model", 5, value=torch.ones(2)),
        changed("model", "decoder.layers.7.fc1.weight", value=torch.ones(2)),
    ]  # fmt: skip
    for number, state in enumerate(cases):
        torch.save(state, entries.path)
        for command, arguments in (
            (alma_eval, ["--stream", str(entries.stream)]), (alma_grow, [str(entries.grown), "--experts", "1"]),
        ):  # fmt: skip
            assert command([str(entries.path), *arguments]) == 2, number
            printed = entries.capsys.readouterr().err
            assert printed.count("\n") == 1 and "given.pt" in printed, (number, printed)


def test_an_architecture_that_code_of_the_user_registers_needs_plugin(
    small, entries, stream, tmp_path, capsys, monkeypatch
):
    """It is scored as the same model under one of our names, if the user names the code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_architectures.py").write_text(
        "from fairseq.models import register_model_architecture\n"
        "import fairseq_alma\nfairseq_alma.register()\n"
        "register_model_architecture('switch_lm', 'my_switch')(lambda args: None)\n"
    )
    named = ["--stream", str(stream), "--json"]
    assert alma_eval([str(write(small, entries.path)), *named]) == 0
    expected = capsys.readouterr().out
    write(with_model(small, _name="my_switch"), entries.path)
    assert alma_eval([str(entries.path), *named]) == 2
    assert "is a checkpoint of my_switch" in (printed := capsys.readouterr().err)
    assert "--plugin MODULE" in printed
    assert alma_eval([str(entries.path), *named, "--plugin", "my_architectures"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.slow
def test_a_training_is_resumed_from_a_hostile_checkpoint_without_running_code(
    stream, tmp_path, canary, payload, user_dir
):
    """Its configuration is that of the command, which is written anew."""
    short = {"updates": 2, "validations": 1}
    command = prepared(stream, tmp_path / "run", **short)
    member = tmp_path / "run/stages/stage_001/member_1"
    assert train_member_in_a_fork(command, member / "log.txt") == 0
    state = read_checkpoint(member / LAST)
    state["optimizer_history"][-1]["num_updates"] = 1
    hostile = {**dict.fromkeys(STRINGS_THAT_FAIRSEQ_EVALUATES, payload), "_target_": "os.system", "_name": "fconv_lm"}
    state["cfg"] = {name: {**values, **hostile} for name, values in state["cfg"].items() if isinstance(values, dict)}
    state["cfg"]["common"]["user_dir"] = str(user_dir)
    write_checkpoint(state, member / LAST)
    (member / BEST).unlink()
    (member / "config.yaml").write_text(f"common: {{user_dir: {user_dir}}}\n")
    command = prepared(stream, tmp_path / "run", **short)
    assert train_member_in_a_fork(command, member / "log.txt") == 0, (member / "log.txt").read_text()[-2000:]
    assert num_updates(read_checkpoint(member / LAST)) == 2
    assert not canary.exists()


def test_pickled_code_is_not_loaded(tmp_path, canary, stream, capsys):
    class Evil:
        def __reduce__(self):
            return Path.touch, (canary,)

    torch.save({"model": {}, "cfg": Evil()}, tmp_path / "evil.pt")
    assert alma_eval([str(tmp_path / "evil.pt"), "--stream", str(stream)]) == 2
    assert alma_grow([str(tmp_path / "evil.pt"), str(tmp_path / "grown.pt"), "--experts", "1"]) == 2
    assert capsys.readouterr().err.count("no complete checkpoint") == 2
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "evil.pt"))
    assert not canary.exists()
