"""A grown checkpoint: what it holds, and that fairseq's own commands read it."""

import math
import re
from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import num_updates, read_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.growth.checkpoint import main as alma_grow
from fairseq_alma.growth.experts import experts_with_largest_loss, grow_experts
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.commands import STAGE, run_command
from tests.fairseq_alma.lm.test_learners import fairseq_train_in_a_fork
from tests.fairseq_alma.processes import NoProcesses
from tests.fairseq_alma.test_fairseq_commands import records

MIXTURES = [f"decoder.layers.{layer}.mixture." for layer in (1, 3)]
FAIRSEQ = ("--user-dir", "fairseq_alma", "--task", "alma_lm")


def same_models(a: Path, b: Path) -> None:
    """Assert that two checkpoints hold the same configuration and weights, to the last bit."""
    a, b = (read_checkpoint(path) for path in (a, b))
    assert a["cfg"]["model"] == b["cfg"]["model"]
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


@pytest.fixture(scope="module")
def grown(trained, tmp_path_factory) -> dict[str, Path]:
    """`trained` with 6 experts instead of 4, by either kind of router."""
    folder, before = tmp_path_factory.mktemp("grown"), sha256_of(trained)
    paths = {router: folder / "new" / f"{router}.pt" for router in ("copy", "tree")}
    for router, path in paths.items():
        grow_checkpoint(trained, path, 2, router=router, seed=1004)
    assert sha256_of(trained) == before
    return paths


@pytest.mark.parametrize("router", ["copy", "tree"])
def test_a_grown_checkpoint_says_so_and_leaves_out_what_does_not_fit(grown, trained, router):
    before, after = read_checkpoint(trained), read_checkpoint(grown[router])
    assert (before["cfg"]["model"]["num_experts"], after["cfg"]["model"]["num_experts"]) == (4, 6)
    assert "last_optimizer_state" in before
    assert "last_optimizer_state" not in after
    assert before.keys() - after.keys() == {"last_optimizer_state"}
    assert after["extra_state"] == before["extra_state"]  # counts and clock, from which a stage continues
    for prefix in MIXTURES:
        parents = experts_with_largest_loss(before["model"][prefix + "valid_loss_E"], 2)
        assert torch.equal(
            after["model"][prefix + "fc1_weight"], before["model"][prefix + "fc1_weight"][[0, 1, 2, 3, *parents]]
        )
        assert after["model"][prefix + "valid_loss_E"].tolist() == [0.0] * 6
        assert after["model"][prefix + "valid_tokens_E"].tolist() == [0.0] * 6
        split = parents if router == "tree" else [-1, -1]
        assert after["model"][prefix + "router.split_E"].tolist() == [-1, -1, -1, -1, *split]


def test_eval_lm_and_validate_read_a_tree_and_find_the_perplexity_it_had(grown, trained, stream):
    folder = StreamFolder.open(stream)
    scored = {}
    for name, path in {"before": trained, **grown}.items():
        model, task = load_member(path, folder, torch.device("cpu"))
        assert model.mixtures[0].num_experts == (4 if name == "before" else 6)
        scored[name] = combine([score_tokens(model, task, "test").log_probability_T], num_words=1).perplexity
    assert scored["tree"] == pytest.approx(scored["before"], rel=1e-6)
    # The paper's router does not keep it: gate probabilities are smaller.
    assert abs(math.log(scored["copy"] / scored["before"])) > 1e-4

    result = run_command(
        "fairseq-eval-lm", stream, *FAIRSEQ, "--path", grown["tree"], "--gen-subset", "test",
        "--tokens-per-sample", 32, "--batch-size", 8,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    printed = re.search(r"Perplexity: ([\d.]+)", result.stdout + result.stderr)[1]
    assert float(printed) == pytest.approx(scored["before"], abs=0.006)  # it prints two digits

    result = run_command("fairseq-validate", stream, *FAIRSEQ, "--path", grown["tree"], "--batch-size", 5)
    assert result.returncode == 0, result.stderr[-3000:]
    perplexity = float(re.search(r"\| ppl ([\d.]+)", result.stdout + result.stderr)[1])
    assert perplexity == pytest.approx(read_checkpoint(trained)["extra_state"]["val_loss"], rel=1e-4)


def test_a_stage_starts_from_a_grown_checkpoint_and_ranks_all_its_experts(grown, trained, stream, tmp_path):
    arguments = ["--mega-batches", "3", "--max-update", 6, "--save-dir", tmp_path, "--num-experts", 6]
    log = tmp_path / "log.txt"
    status = fairseq_train_in_a_fork([stream, *STAGE, *arguments, "--finetune-from-model", grown["tree"]], log)
    assert status == 0, log.read_text()[-3000:]
    before, after = read_checkpoint(grown["tree"]), read_checkpoint(tmp_path / "checkpoint_best.pt")
    assert num_updates(after) == 6  # counted from 0 again
    # It starts from what the model had learned: an untrained one has a perplexity of the 24 types.
    first = records(log.read_text(), "train_inner")[0]
    assert float(first["ppl"]) < 2 * read_checkpoint(trained)["extra_state"]["val_loss"] < 24
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    for prefix in MIXTURES:
        assert after["model"][prefix + "valid_tokens_E"].sum() == tokens
        assert len(after["model"][prefix + "valid_loss_E"]) == 6
        split_E = before["model"][prefix + "router.split_E"]
        assert torch.equal(after["model"][prefix + "router.split_E"], split_E)
        for name in ("router.weight", "fc1_weight"):  # nodes and copies train too
            assert not torch.equal(after["model"][prefix + name][4:], before["model"][prefix + name][4:])
    # Another growth can follow: copies of copies.
    grow_checkpoint(tmp_path / "checkpoint_best.pt", tmp_path / "again.pt", 6, router="tree", seed=2)
    assert read_checkpoint(tmp_path / "again.pt")["cfg"]["model"]["num_experts"] == 12


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("--num-experts", 6), "but this model has 6: give --num-experts 4, or add 2 with alma-grow first"),
        (("--num-experts", 2), "but this model has 2: give --num-experts 4; experts cannot be removed"),
        (
            ("--decoder-embed-dim", 64),
            "the checkpoint belongs to a model with other sizes (decoder.embed_tokens.weight has shape",
        ),
    ],
)
def test_a_stage_of_other_sizes_is_reported_in_its_log(trained, stream, tmp_path, sizes, message):
    arguments = ["--max-update", 2, "--save-dir", tmp_path, "--finetune-from-model", trained, *sizes]
    log = tmp_path / "log.txt"
    assert fairseq_train_in_a_fork([stream, *STAGE, *arguments], log) != 0
    assert message in log.read_text()
    assert not list(tmp_path.glob("*.pt"))


def test_the_command_grows_and_says_what_to_do_with_it(trained, grown, tmp_path):
    target = tmp_path / "new" / "grown.pt"
    result = run_command("alma-grow", trained, target, "--experts", 2, "--router", "tree", "--seed", 1)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--finetune-from-model and the new --num-experts" in result.stdout
    same_models(grown["tree"], target)  # without --stage the growth is numbered by its experts: seed 1, 4 experts
    assert [path.name for path in target.parent.iterdir()] == ["grown.pt"]


def test_the_command_reproduces_the_growth_of_a_run(trained, stream, tmp_path):
    out = tmp_path / "run"
    values = {"stream": str(stream), "out": str(out), "learner": "gmoe", "arch": "switch_lm_tiny", "seed": 7,
              "tokens_per_sample": 32, "sequences_per_update": 8, "updates": 4, "grow_experts": 2}  # fmt: skip
    folder = StreamFolder.open(stream)
    learner = make_learner(LanguageModelSettings.from_mapping(values), folder.without_test(), NoProcesses())
    learner._continuations = {1: trained}  # as after stage 1
    arrivals = tuple(folder.stream())
    stage = Stage(2, arrivals[1:2], arrivals[:1], False, out / "stages" / "stage_002")
    learner.grow(stage)
    by_run = stage.folder / "grow/member_1/checkpoint_grown.pt"
    by_command, other = tmp_path / "grown.pt", tmp_path / "other.pt"
    arguments = ["--experts", "2", "--seed", "7"]
    assert alma_grow([str(trained), str(by_command), *arguments, "--stage", "2"]) == 0
    assert alma_grow([str(trained), str(other), *arguments, "--stage", "3"]) == 0
    same_models(by_run, by_command)
    row = MIXTURES[0] + "router.weight"
    assert not torch.equal(read_checkpoint(by_run)["model"][row], read_checkpoint(other)["model"][row])


def test_a_checkpoint_can_be_grown_in_place(trained, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(trained.read_bytes())
    grow_checkpoint(path, path, 1)
    assert read_checkpoint(path)["cfg"]["model"]["num_experts"] == 5
    assert len(read_checkpoint(path)["model"][MIXTURES[0] + "fc1_weight"]) == 5


def test_bad_input_to_the_command_gives_one_message_and_nothing_is_written(trained, grown, tmp_path, capsys):
    cut_short, not_ours, target = (tmp_path / name for name in ("cut_short.pt", "not_ours.pt", "target.pt"))
    cut_short.write_bytes(trained.read_bytes()[:10_000])
    torch.save({"model": {"w": torch.zeros(2)}, "cfg": {"model": {"_name": "transformer_lm"}}}, not_ours)
    for arguments, message in [
        ((tmp_path / "none.pt", target, "--experts", 1), "no complete checkpoint at"),
        ((cut_short, target, "--experts", 1), "no complete checkpoint at"),
        ((not_ours, target, "--experts", 1), "is not a checkpoint of a switch_lm"),
        ((trained, target, "--experts", -1), "cannot add -1 experts to"),
        ((trained, target, "--experts", 0), "give --experts 1 or more"),
        ((trained, trained, "--experts", 1), "exists already: choose another name"),
        ((trained, target, "--experts", 5), "cannot copy 5 of 4 experts"),
        ((trained, target, "--experts", 1, "--noise", 0), "noise=0.0 must be finite and above 0"),
        ((trained, target, "--experts", 1, "--noise", "inf"), "noise=inf must be finite and above 0"),
        ((trained, target, "--experts", 1, "--seed", 10**20), "must be at least 0 and below 1000000"),
        # Grown and not validated since: the experts have no losses.
        ((grown["tree"], target, "--experts", 1), "use a checkpoint that was saved after a validation"),
    ]:
        assert alma_grow([str(word) for word in arguments]) == 2
        output = capsys.readouterr().err
        assert output.startswith("alma-grow: ")
        assert output.count("\n") == 1
        assert message in output
        assert str(arguments[0]) in output  # which file
        assert not target.exists()
    for arguments, option in (((trained, target), "--experts"), ((trained, target, "--router", "forest"), "--router")):
        with pytest.raises(SystemExit) as caught:
            alma_grow([str(word) for word in arguments])
        assert caught.value.code == 2
        assert option in capsys.readouterr().err


def test_after_another_criterion_a_model_can_grow_too(stream, tmp_path):
    """The task validates with our criterion, whichever trains. So it records the losses of experts."""
    stage = [word if word != "switch_lm" else "cross_entropy" for word in STAGE]
    result = run_command(
        "fairseq-train", stream, *stage, "--mega-batches", 1, "--max-update", 1, "--save-dir", tmp_path, "--cpu",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert read_checkpoint(tmp_path / "checkpoint_best.pt")["extra_state"]["val_loss"] > 0
    assert alma_grow([str(tmp_path / "checkpoint_best.pt"), str(tmp_path / "grown.pt"), "--experts", "1"]) == 0


def test_growing_from_nowhere_is_a_setting_error_for_callers_too(tmp_path):
    with pytest.raises(SettingError, match=r"train a stage first"):
        grow_checkpoint(tmp_path / "none.pt", tmp_path / "target.pt", 1)


def test_a_tree_divides_the_tokens_of_a_parent_evenly_for_most_seeds(stream, trained):
    """Of 100 seeds, at least 95 leave both twins with 20% to 80% of the tokens, in both mixtures."""
    state = read_checkpoint(trained)["model"]
    model, task = load_member(trained, StreamFolder.open(stream), torch.device("cpu"))
    inputs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {prefix: [] for prefix in MIXTURES}
    for prefix, mixture in zip(MIXTURES, model.mixtures, strict=True):
        mixture.router.register_forward_hook(
            lambda _, x, routing, prefix=prefix: inputs[prefix].append((x[0], routing.expert_T))
        )
    score_tokens(model, task, "valid")
    balanced = {"tree": 0, "without the mean": 0}
    for seed in range(100):
        for kind in balanced:
            known = dict(state)
            if kind != "tree":
                names = [prefix + "valid_input_ED" for prefix in MIXTURES]
                known |= {name: torch.zeros_like(state[name]) for name in names}
            rows = grow_experts(known, 1, router="tree", seed=seed)
            shares = []
            for prefix in MIXTURES:
                (parent,) = experts_with_largest_loss(state[prefix + "valid_loss_E"], 1)
                x_TD = torch.cat([x[expert == parent] for x, expert in inputs[prefix]])
                shares.append(float((x_TD @ rows[prefix + "router.weight"][-1] > 0).float().mean()))
            balanced[kind] += all(0.2 <= share <= 0.8 for share in shares)
    assert balanced["tree"] >= 95
    assert balanced["without the mean"] < balanced["tree"]
