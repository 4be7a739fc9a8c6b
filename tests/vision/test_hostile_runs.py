"""A run folder of somebody else runs no code: neither `vision.load` nor a continued run calls what it names.

The code would create a file, the canary: a module in the current folder does so when it is imported.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

import vision
from fairseq_alma.core.errors import AlmaError, SettingError
from fairseq_alma.core.files import read_json, sha256_of, write_json
from tests.vision.tiny_runs import small_run
from vision.checkpoints import read_checkpoint

FUNCTION = """from torch import nn
from pathlib import Path

def make(image_shape, num_classes, width):
    channels, height, side = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * side, width), nn.Linear(width, num_classes))
"""
RESNET = {"backbone": "resnet20", "width": 4, "epochs": 1, "mega_batches": 4}
NAMES = [
    "evil:make", "evil:Path", "os:abort", "os:system", "http.server:test", "torchvision.models:resnet18", "evil", "vgg",
    "mlp", "", ":", "grown by Firefly", None, 5, ["evil:make"], {"_target_": "evil.make"}, "\x1b[31mevil:make",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_of_resnet(tmp_path_factory) -> Path:
    """A run in which two of four mega-batches have arrived."""
    folder = tmp_path_factory.mktemp("resnet") / "run"
    small_run(folder, **RESNET, arrivals=2)
    return folder


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Path:
    """A file that exists after the import of the module `evil`, which is in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n{FUNCTION}")
    yield tmp_path / "canary"
    sys.modules.pop("evil", None)


@pytest.fixture
def foreign(run_of_resnet, canary, tmp_path) -> Path:
    """A copy of the run, which a test changes."""
    return Path(shutil.copytree(run_of_resnet, tmp_path / "run"))


def change(run: Path, do) -> None:
    """Change the content of all files with networks, and record their new digests, as an attacker would."""
    for path in run.glob("stages/*/*/networks.pt"):
        state = torch.load(path, weights_only=True)
        do(state)
        torch.save(state, path)
    for path in (run / "predictor.json", *run.glob("stages/*/*/learner.json")):
        described = read_json(path)  # without the digest of the file itself
        for checkpoint in described.get("checkpoints", described.get("files")):
            checkpoint["sha256"] = sha256_of(run / checkpoint["path"])
        write_json(path, described)


def settings_of(run: Path, **changes) -> None:
    values = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps({**values, **changes}))


def refusals(run: Path, continues: bool = True) -> dict[str, str]:
    """Return the message of each entry point. All of them must refuse the run.

    Args:
        run: the run folder.
        continues: whether to try to continue the run, too, which takes longer.
    """
    found = {}
    (path,) = {run / one["path"] for one in json.loads((run / "predictor.json").read_text())["checkpoints"]}
    for name, call in (
        ("load", lambda: vision.load(run)),
        ("continued run", lambda: small_run(run, **RESNET, arrivals=4)),
        ("read_checkpoint", lambda: read_checkpoint(path, torch.device("cpu"))),
    ):
        if name == "continued run" and not continues:
            continue
        with pytest.raises(AlmaError) as caught:
            call()
        found[name] = str(caught.value)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_networks_does_not_choose_the_code(foreign, canary, name):
    change(foreign, lambda state: state["structure"].update(backbone=name))
    path = foreign.name
    said = refusals(foreign) if name not in ("vgg", "mlp") else {}
    for call in (lambda: vision.load(foreign), lambda: small_run(foreign, **RESNET, arrivals=4)):
        with pytest.raises(SettingError, match=r"contains networks of backbone=.* but backbone=resnet20 was given"):
            call()
    assert all(path in message and "backbone=" in message and "\x1b" not in message for message in said.values())
    assert not canary.exists()


VALUES = [None, 10**9, 10**30, "__import__('evil')", {"_target_": "evil.make"}]
MORE_VALUES = [math.nan, -1, 0, "32", [1], True]


@pytest.mark.parametrize("values", [VALUES, pytest.param(MORE_VALUES, marks=pytest.mark.slow)], ids=["some", "more"])
@pytest.mark.parametrize("field", ["image_shape", "num_classes", "width", "layers", "mixture"])
def test_hostile_sizes_of_networks_are_refused_by_their_name(foreign, canary, field, values):
    for number, value in enumerate(values):
        if value is None and field in ("layers", "mixture"):
            continue  # the usual value
        for hostile in (value, [value, 8, 8], [[value, True]]):
            if field == "mixture" and hostile != {"_target_": "evil.make"}:
                continue  # it is not read for networks without mixtures
            change(foreign, lambda state, changes={field: hostile}: state["structure"].update(changes))
            if field == "mixture":
                vision.load(foreign)
            else:
                said = refusals(foreign, continues=number == 0)
                assert all(field in message or "backbone=" in message for message in said.values()), (hostile, said)
            assert not canary.exists()


def test_tensors_that_would_not_fit_into_memory_are_refused(foreign, canary):
    name, value = "0.0.weight", torch.ones(1).expand(1, 10**12)
    change(foreign, lambda state: state["parameters"].update({name: value}))
    assert all("the values of 0.0.weight are not in the file" in message for message in refusals(foreign).values())


@pytest.mark.parametrize(
    ("learner", "changes", "message"),
    [
        ("sm", {"sizes": [64, 10**9, 8, 10]}, "the sizes of the networks do not fit"),
        ("sm", {"sizes": "evil:make"}, "the sizes of the networks do not fit"),
        ("sm", {"kind": "evil:make"}, "evil:make"),
        ("sm", {"kind": ["mlp"]}, "unhashable"),
        ("sm", {"kind": "module", "structure": {"backbone": "evil:make"}}, "backbone='evil:make'"),
        ("moe", {"gates": [{"root": 10**9, "splits": [[]]}] * 2}, "root=1000000000"),
        ("moe", {"gates": [{"root": "__import__('evil')", "splits": [[]]}] * 2}, "root="),
        ("moe", {"sizes": [64, 10**9, 8, 10]}, "the sizes of the networks do not fit"),
    ],
)
def test_hostile_perceptrons_are_refused(tmp_path, canary, learner, changes, message):
    small_run(tmp_path / "run", learner=learner, epochs=1, **({"experts": 2} if learner == "moe" else {}))
    change(tmp_path / "run", lambda state: state.update(changes))
    with pytest.raises(AlmaError, match=message):
        vision.load(tmp_path / "run")
    assert not canary.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"backbone": "evil:make"}, {"backbone": "os:abort"}, {"backbone": "evil"}, {"backbone": ["evil:make"]},
        {"backbone": "evil:make", "plugin": "evil"}, {"backbone": "evil:make", "backbone_digest": "0" * 16},
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_file", [True, False])
def test_settings_of_a_run_do_not_choose_the_code(foreign, canary, changes, in_file):
    settings_of(foreign, **changes)
    if in_file:
        change(foreign, lambda state: state["structure"].update(backbone=changes["backbone"]))
    with pytest.raises(AlmaError, match="backbone") as caught:
        vision.load(foreign)
    if isinstance(changes["backbone"], str) and ":" in changes["backbone"]:
        assert f"if you trust it, vision.load(..., backbone={changes['backbone']!r})" in str(caught.value)
    with pytest.raises(AlmaError, match="backbone"):
        small_run(foreign, **RESNET, arrivals=4)
    assert not canary.exists()


def test_other_code_that_settings_name_is_not_run(foreign, canary):
    """A plugin is needed only if it registers the network."""
    settings_of(foreign, plugin="evil", transform="evil:make", dataset="evil:make", learner="evil")
    vision.load(foreign)
    assert not canary.exists()


def test_a_function_that_the_user_names_is_called(tmp_path, canary):
    run = tmp_path / "own"
    own = {"backbone": "evil:make", "epochs": 1}
    small_run(run, **own, arrivals=2)
    small_run(run, **own, arrivals=4)  # the same command continues its own run
    canary.unlink()
    sys.modules.pop("evil")
    with pytest.raises(SettingError, match=r"if you trust it, vision\.load\(\.\.\., backbone='evil:make'\)"):
        vision.load(run)
    with pytest.raises(SettingError, match=r"was made with backbone='evil:make', not 'resnet20'"):
        vision.load(run, backbone="resnet20")
    assert not canary.exists()
    by_name = vision.load(run, backbone="evil:make")
    assert canary.exists()
    images = vision.load_dataset("digits").test.images
    assert (vision.load(run, backbone=sys.modules["evil"].make)(images) == by_name(images)).all()


def test_a_run_that_is_continued_deletes_no_file_of_another_run(tmp_path, canary):
    small_run(tmp_path / "run", epochs=1, arrivals=2)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (victim,) = (tmp_path / "other").glob("stages/stage_002/*/networks.pt")
    for path in (tmp_path / "run").glob("stages/*/*/learner.json"):
        write_json(path, {**read_json(path), "networks": f"../{victim.relative_to(tmp_path)}"})
    with pytest.raises(AlmaError, match=r"names the file .*networks.pt, which is not in its folder"):
        small_run(tmp_path / "run", epochs=1, arrivals=4)
    assert victim.exists()
