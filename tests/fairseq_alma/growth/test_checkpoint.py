"""A saved model grown: what fairseq's own tools make of it."""

import math
import re
from pathlib import Path

import pytest
import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.perplexity import combine, load_member, score_tokens
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.growth.checkpoint import main as alma_grow
from fairseq_alma.growth.experts import losing_experts
from fairseq_alma.lm.checkpoints import num_updates, read_whole
from tests.commands import STAGE, run_command
from tests.fairseq_alma.lm.test_learners import fairseq_train_in_a_fork
from tests.fairseq_alma.test_fairseq_commands import records

MIXTURES = [f"decoder.layers.{layer}.mixture." for layer in (1, 3)]
FAIRSEQ = ("--user-dir", "fairseq_alma", "--task", "alma_lm")


@pytest.fixture(scope="module")
def grown(trained, tmp_path_factory) -> dict[str, Path]:
    """`trained` with 6 experts in place of 4, by either kind of router."""
    folder, before = tmp_path_factory.mktemp("grown"), sha256_of(trained)
    paths = {router: folder / "new" / f"{router}.pt" for router in ("copy", "tree")}
    for router, path in paths.items():
        grow_checkpoint(trained, path, 2, router=router, seed=1004)
    assert sha256_of(trained) == before
    return paths


@pytest.mark.parametrize("router", ["copy", "tree"])
def test_a_grown_checkpoint_says_so_and_leaves_out_what_does_not_fit(grown, trained, router):
    before, after = read_whole(trained), read_whole(grown[router])
    assert (before["cfg"]["model"]["num_experts"], after["cfg"]["model"]["num_experts"]) == (4, 6)
    assert "last_optimizer_state" in before
    assert "last_optimizer_state" not in after
    assert before.keys() - after.keys() == {"last_optimizer_state"}
    assert after["extra_state"] == before["extra_state"]  # counts and clock, which a stage goes on from
    for prefix in MIXTURES:
        parents = losing_experts(before["model"][prefix + "valid_loss_E"], 2)
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
    # The paper's router does not keep it: gate probabilities have shrunk.
    assert abs(math.log(scored["copy"] / scored["before"])) > 1e-4

    result = run_command(
        "fairseq-eval-lm", stream, *FAIRSEQ, "--path", grown["tree"], "--gen-subset", "test",
        "--tokens-per-sample", 32, "--batch-size", 8,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    said = re.search(r"Perplexity: ([\d.]+)", result.stdout + result.stderr)[1]
    assert float(said) == pytest.approx(scored["before"], abs=0.006)  # it prints two digits

    result = run_command("fairseq-validate", stream, *FAIRSEQ, "--path", grown["tree"], "--batch-size", 5)
    assert result.returncode == 0, result.stderr[-3000:]
    perplexity = float(re.search(r"\| ppl ([\d.]+)", result.stdout + result.stderr)[1])
    assert perplexity == pytest.approx(read_whole(trained)["extra_state"]["val_loss"], rel=1e-4)


def test_a_stage_goes_on_from_a_grown_checkpoint_and_ranks_all_its_experts(grown, trained, stream, tmp_path):
    arguments = ["--mega-batches", "3", "--max-update", 6, "--save-dir", tmp_path, "--num-experts", 6]
    log = tmp_path / "log.txt"
    status = fairseq_train_in_a_fork([stream, *STAGE, *arguments, "--finetune-from-model", grown["tree"]], log)
    assert status == 0, log.read_text()[-3000:]
    before, after = read_whole(grown["tree"]), read_whole(tmp_path / "checkpoint_best.pt")
    assert num_updates(after) == 6  # counted anew
    # It starts from what the model had learned: an untrained one has a perplexity of the 24 types.
    first = records(log.read_text(), "train_inner")[0]
    assert float(first["ppl"]) < 2 * read_whole(trained)["extra_state"]["val_loss"] < 24
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    for prefix in MIXTURES:
        assert after["model"][prefix + "valid_tokens_E"].sum() == tokens
        assert len(after["model"][prefix + "valid_loss_E"]) == 6
        split_E = before["model"][prefix + "router.split_E"]
        assert torch.equal(after["model"][prefix + "router.split_E"], split_E)
        for name in ("router.weight", "fc1_weight"):  # nodes and twins train too
            assert not torch.equal(after["model"][prefix + name][4:], before["model"][prefix + name][4:])
    # A growth can follow: twins of twins.
    grow_checkpoint(tmp_path / "checkpoint_best.pt", tmp_path / "again.pt", 6, router="tree", seed=2)
    assert read_whole(tmp_path / "again.pt")["cfg"]["model"]["num_experts"] == 12


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("--num-experts", 6), "this model 6: give --num-experts 4, or add 2 with alma-grow first"),
        (("--num-experts", 2), "this model 2: give --num-experts 4; experts cannot be taken away"),
        (("--decoder-embed-dim", 64), "the checkpoint is of a model of other sizes (decoder.embed_tokens.weight is"),
    ],
)
def test_a_stage_of_other_sizes_is_told_in_its_log(trained, stream, tmp_path, sizes, message):
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
    # The noise of this growth: seed 1, from 4 experts on.
    by_hand, by_command = (read_whole(path)["model"] for path in (grown["tree"], target))
    assert all(torch.equal(by_hand[name], by_command[name]) for name in by_hand.keys() | by_command.keys())
    assert [path.name for path in target.parent.iterdir()] == ["grown.pt"]


def test_a_checkpoint_can_be_grown_in_place(trained, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(trained.read_bytes())
    grow_checkpoint(path, path, 1)
    assert read_whole(path)["cfg"]["model"]["num_experts"] == 5
    assert len(read_whole(path)["model"][MIXTURES[0] + "fc1_weight"]) == 5


def test_bad_input_to_the_command_is_told_in_one_message_and_nothing_is_written(trained, grown, tmp_path, capsys):
    cut_short, not_ours, target = (tmp_path / name for name in ("cut_short.pt", "not_ours.pt", "target.pt"))
    cut_short.write_bytes(trained.read_bytes()[:10_000])
    torch.save({"model": {"w": torch.zeros(2)}, "cfg": {"model": {"_name": "transformer_lm"}}}, not_ours)
    for arguments, message in [
        ((tmp_path / "none.pt", target, "--experts", 1), "no whole checkpoint at"),
        ((cut_short, target, "--experts", 1), "no whole checkpoint at"),
        ((not_ours, target, "--experts", 1), "is no checkpoint of a switch_lm"),
        ((trained, target, "--experts", -1), "-1 experts: growth adds experts, it never takes any away"),
        ((trained, target, "--experts", 5), "5 experts are to be copied, there are 4"),
        ((trained, target, "--experts", 1, "--noise", 0), "noise=0.0 must be above 0"),
        # Grown and not validated since: nobody knows who loses most.
        ((grown["tree"], target, "--experts", 1), "take a checkpoint that was saved after a validation"),
    ]:
        assert alma_grow([str(word) for word in arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("alma-grow: ")
        assert said.count("\n") == 1
        assert message in said
        assert str(arguments[0]) in said  # which file
        assert not target.exists()
    for arguments in ((trained, target), (trained, target, "--experts", 1, "--router", "forest")):
        with pytest.raises(SystemExit) as caught:
            alma_grow([str(word) for word in arguments])
        assert caught.value.code == 2
        assert "--experts" in capsys.readouterr().err


def test_growing_from_nowhere_is_a_setting_error_for_callers_too(tmp_path):
    with pytest.raises(SettingError, match=r"train a stage first"):
        grow_checkpoint(tmp_path / "none.pt", tmp_path / "target.pt", 1)
