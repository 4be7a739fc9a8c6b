"""Runs in lm-evaluation-harness: log-likelihoods, generation, tasks from files, and what is recorded."""

import json
import math
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from fairseq_alma.api import load
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.core.task_scores import read_task_scores
from fairseq_alma.deploy import deploy
from fairseq_alma.evaluation import harness
from fairseq_alma.evaluation.cli import main as alma_eval
from fairseq_alma.evaluation.harness import AlmaLM
from tests.commands import RUN, run_command


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two stages of an ensemble of two, on Python's language reference."""
    folder = tmp_path_factory.mktemp("harness")
    lines = [line for topic in topics.values() for line in topic.splitlines()]
    (folder / "topics.txt").write_text("\n".join(lines)[:60_000])
    result = run_command(
        "alma-prep", folder / "stream", "--source", f"text:{folder / 'topics.txt'}", "--mega-batches", 2,
        "--vocab-size", 400, "--valid-words", 300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    result = run_command(
        "alma-lm", f"stream={folder / 'stream'}", f"out={folder / 'run'}", *RUN, "learner=ens", "members=2",
        "updates=15", "validations=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "run"


@pytest.fixture(scope="module")
def model(run) -> AlmaLM:
    return AlmaLM(run, device="cpu")


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def by_hand(model: AlmaLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-probability of tokens under the mean of the members' probabilities, one text at a time."""
    ids = torch.tensor([[*context, *continuation][:-1]])
    with torch.no_grad():
        members = [member(ids)[0][0].double().softmax(-1) for member in model.predictor.members]
    mean = sum(members)[-len(continuation) :] / len(members)
    chosen = mean[torch.arange(len(continuation)), continuation]
    return chosen.log().sum().item(), mean.argmax(-1).tolist() == continuation


def documents_of(run: Path, split: str) -> tuple[list[str], int]:
    """The texts of a split of a run's stream, and its number of tokens."""
    predictor, stream = load(run), StreamFolder.open(run.parent / "stream")
    tokens = np.fromfile(stream.prefix(split).with_suffix(".bin"), stream.description["dtype"])
    documents = np.split(tokens, np.flatnonzero(tokens == predictor.tokenizer.eos) + 1)[:-1]
    return [predictor.tokenizer.decode(ids[:-1].tolist()) for ids in documents], len(tokens)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_rolling_log_likelihood_of_the_test_set_is_that_of_the_ledger(run, stage):
    model = AlmaLM(run, stage=stage, device="cpu", batch_size=3)
    texts, num_tokens = documents_of(run, "test")
    whole = "".join(f"{text}</s>" for text in texts)
    (found,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (whole,)), disable_tqdm=True)
    rows = Ledger(run / "ledger.jsonl").rows()
    assert len(model.predictor.members) == 2
    assert math.exp(-found / num_tokens) == pytest.approx(rows[stage].scores.perplexity, rel=1e-6)
    bits = -found / math.log(2) / sum(len(text.encode()) for text in texts)
    assert bits == pytest.approx(rows[stage].scores.bits_per_byte, rel=1e-6)


def test_log_likelihoods_are_those_of_a_plain_loop_in_any_batch(model, run):
    texts, _ = documents_of(run, "valid")
    pairs = [(text.split()[:3], text.split()[3 : 3 + number]) for number, text in enumerate(texts[:4], start=1)]
    pairs = [(" ".join(before), " " + " ".join(after)) for before, after in pairs]
    pairs += [("", texts[0][:40]), ("the value of ", "the"), ("An object</s>", "A class")]
    encode, expected = model.predictor.tokenizer.encode, []
    for before, after in pairs:
        # Spaces belong to the continuation, whose first word the tokenizer joins with them.
        context = [2, *encode(before.removesuffix("</s>").rstrip())]
        whole = [*context, 2, *encode(after)] if "</s>" in before else [2, *encode(before + after)]
        context += [2] if "</s>" in before else []
        assert whole[: len(context)] == context and len(whole) <= 33
        expected.append(by_hand(model, context, whole[len(context) :]))
    for batch_size in (1, 4, "auto"):
        other = AlmaLM(model.predictor, batch_size=batch_size)
        found = other.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]


def test_a_continuation_that_is_a_part_of_a_token_is_scored_alone(model):
    tokenizer = model.predictor.tokenizer
    words = [tokenizer.decode([index]) for index in tokenizer.token_ids]
    is_token = {word: len(tokenizer.encode(word)) == 1 for word in words if word.isalpha()}
    before, after = next((word[:-1], word[-1]) for word in is_token if is_token[word] and is_token.get(word[:-1]))
    [(found, _)] = model.loglikelihood(requests("loglikelihood", (before, after)), disable_tqdm=True)
    expected = by_hand(model, [2, *tokenizer.encode(before)], tokenizer.encode(after))
    assert found == pytest.approx(expected[0], abs=1e-4)


def test_the_likeliest_continuation_is_said_to_be_the_likeliest(model):
    written = model.predictor.generate("The statement", max_tokens=8, temperature=0)[0]
    context = model.tok_encode("The statement")
    found = model._loglikelihood_tokens(
        [(("", ""), context, written.ids), (("", ""), context, [written.ids[0] + 1])], disable_tqdm=True
    )
    assert [likeliest for _, likeliest in found] == [True, False]


def test_long_texts_are_cut_with_a_warning(model, caplog):
    encode, long = model.predictor.tokenizer.encode, "the value of an attribute reference " * 30
    (short, cut, longer) = model.loglikelihood(
        requests("loglikelihood", ("the", " name"), (long, " name"), ("the", long)), disable_tqdm=True
    )
    assert caplog.text.count("2 of 3 texts have more than 32 tokens: the beginning of their context is left out") == 1
    assert short[0] == pytest.approx(by_hand(model, [2, *encode("the")], encode(" name"))[0], abs=1e-4)
    context = encode(long.rstrip())
    last = encode(long + " name")[len(context) :]
    assert cut[0] == pytest.approx(by_hand(model, context[len(last) - 33 :], last)[0], abs=1e-4)
    # A continuation with more tokens than the model takes at once is scored in blocks, as a document is.
    tokens, total = [*encode("the" + long)], 0.0
    continuation = tokens[len(encode("the")) :]
    before = [*tokens[: len(encode("the"))], *continuation][len(encode("the")) - 1 :]
    for start in range(0, len(continuation), 32):
        total += by_hand(model, before[start : start + 1], continuation[start : start + 32])[0]
    assert longer[0] == pytest.approx(total, abs=1e-3)


def test_long_contexts_of_generated_texts_are_cut_with_a_warning(model, caplog):
    long = "the value of an attribute reference " * 30
    options = {"max_gen_toks": 3, "until": ["\0"]}
    (found,) = model.generate_until(requests("generate_until", (long, options)), disable_tqdm=True)
    assert caplog.text.count("1 of 1 contexts have more than 32 tokens: their beginning is left out") == 1
    context, ids = model.predictor.tokenizer.encode(long), []
    never = model.predictor._never_chosen(with_eos=False)
    for place in range(3):  # the last tokens, with room for those that may follow
        scores = model.predictor.logits([*context, *ids][-29 - place :][:32])[-1].index_fill(0, never, -math.inf)
        ids.append(int(scores.argmax()))
    assert found == model.predictor._text_after(context, ids)


def test_generation_ends_at_the_first_of_the_given_texts(model):
    whole = model.predictor.generate("The statement", max_tokens=20, temperature=0)[0].text
    stop = whole[len(whole) // 2 :][:3]
    options = {"until": [stop], "max_gen_toks": 20}
    found = model.generate_until(
        requests("generate_until", ("The statement", options), ("A", {"max_gen_toks": 3}), ("The statement", options)),
        disable_tqdm=True,
    )
    assert found[0] == found[2] == whole.split(stop)[0]
    assert found[1] == model.predictor.generate("A", max_tokens=3, temperature=0)[0].text


def test_draws_have_the_options_of_the_task_and_are_the_same_in_each_evaluation(model):
    def drawn(**options):
        options = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 12, **options}
        return model.generate_until(requests("generate_until", *[("The statement", options)] * 4), disable_tqdm=True)

    assert drawn() == drawn() and len(set(drawn())) > 1
    whole = model.predictor.generate("The statement", max_tokens=12, temperature=0)[0].text
    assert set(drawn(top_p=1e-9)) == set(drawn(top_k=1)) == {whole}


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{body}
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""
WORDS = ["attribute", "statement", "object", "value", "class"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, run) -> Path:
    """A folder with two tasks: the next word of a text among three, and a text as it is."""
    folder = tmp_path_factory.mktemp("tasks")
    texts, _ = documents_of(run, "valid")
    with open(folder / "quiz.jsonl", "w") as file:
        for number in range(12):
            question = texts[number % len(texts)][5 * number :][:50].strip()
            choices = [WORDS[(number + offset) % len(WORDS)] for offset in range(3)]
            file.write(json.dumps({"question": question, "choices": choices, "answer": number % 3}) + "\n")
    for name, body in (("next_word", CHOICE), ("as_it_is", ROLLING)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "quiz.jsonl", body=body))
    return folder


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def count_right(model: AlmaLM, tasks: Path) -> float:
    encode, right = model.predictor.tokenizer.encode, []
    for line in (tasks / "quiz.jsonl").read_text().splitlines():
        quiz = json.loads(line)
        context = [2, *encode(quiz["question"])]
        scores = [
            by_hand(model, context, [2, *encode(f"{quiz['question']} {choice}")][len(context) :])[0]
            for choice in quiz["choices"]
        ]
        right.append(max(range(3), key=scores.__getitem__) == quiz["answer"])
    return sum(right) / len(right)


def test_all_stages_are_evaluated_on_tasks_and_recorded(run, tasks, capsys, offline, tmp_path):
    options = ["--tasks", "next_word,as_it_is", "--include-path", str(tasks), "--device", "cpu"]
    assert alma_eval([str(run), *options, "--all-stages", "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == read_task_scores(run)
    assert [(one["stage"], one["task"]) for one in printed] == [
        (stage, task) for stage in (1, 2) for task in ("next_word", "as_it_is")
    ]
    texts = [json.loads(line)["question"] for line in (tasks / "quiz.jsonl").read_text().splitlines()]
    for stage, choice, whole in ((1, *printed[:2]), (2, *printed[2:])):
        model = AlmaLM(run, stage=stage, device="cpu")
        assert next(iter(choice["metrics"])) == "acc"
        assert choice["metrics"]["acc"] == pytest.approx(count_right(model, tasks))
        assert choice["stderr"]["acc"] > 0 and choice["num_examples"] == 12
        bits = sum(one.nats.sum() for one in model.predictor.score(texts)) / math.log(2)
        assert whole["metrics"]["bits_per_byte"] == pytest.approx(bits / sum(len(text.encode()) for text in texts))
        predictor = json.loads((run / f"predictors/stage_00{stage}.json").read_text())["checkpoints"]
        assert choice["checkpoints"] == [one["sha256"] for one in predictor] and len(predictor) == 2
    # For people; and the last stage alone.
    assert alma_eval([str(run), *options, "--limit", "3"]) == 0
    assert "stage 2: next_word: acc " in capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "task_scores.jsonl").read_text().splitlines()]
    assert [one.get("limit") for one in lines] == [None] * 4 + [3, 3]
    assert read_task_scores(run) == printed  # the first examples alone are a trial
    # A folder of alma-deploy is no run: it has no stages, and nothing is recorded there.
    deployed, is_new = deploy(run, tmp_path / "deployed")
    assert is_new and alma_eval([str(deployed), *options, "--limit", "3"]) == 0
    said = capsys.readouterr().out
    assert "next_word: acc " in said and "stage" not in said.split("next_word")[0]
    assert not (deployed / "task_scores.jsonl").exists()
    # The command of lm-evaluation-harness knows no models but its own; its function knows ours by name.
    found = lm_eval.simple_evaluate(
        "alma", f"run={run},stage=1,device=cpu", ["next_word"], log_samples=False,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    assert found["results"]["next_word"]["acc,none"] == printed[0]["metrics"]["acc"]


def test_a_stage_that_ends_during_the_evaluation_does_not_get_its_scores(run, tasks, offline, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "task_scores.jsonl").unlink(missing_ok=True)
    ledger = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)
    predictor = (copy / "predictor.json").read_text()
    (copy / "ledger.jsonl").write_text("".join(ledger[:2]))
    shutil.copy(copy / "predictors/stage_001.json", copy / "predictor.json")
    evaluate = harness.evaluate

    def evaluate_while_it_trains(*arguments):
        found = evaluate(*arguments)
        (copy / "ledger.jsonl").write_text("".join(ledger))
        (copy / "predictor.json").write_text(predictor)
        return found

    monkeypatch.setattr(harness, "evaluate", evaluate_while_it_trains)
    alma_eval([str(copy), "--tasks", "next_word", "--include-path", str(tasks), "--device", "cpu"])
    (score,) = read_task_scores(copy)
    of_first = json.loads((copy / "predictors/stage_001.json").read_text())["checkpoints"]
    assert (score["stage"], score["checkpoints"]) == (1, [one["sha256"] for one in of_first])


@pytest.fixture
def said(run, capsys):
    """A function that calls alma-eval with bad input and returns its message."""

    def call(*arguments) -> str:
        assert alma_eval([str(run), *map(str, arguments)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    return call


@pytest.mark.slow  # the library reads the files of its 14,000 tasks
def test_an_unknown_task_is_refused_with_the_nearest_one(said, tasks):
    assert said("--tasks", "next_wrod", "--include-path", tasks) == (
        "alma-eval: lm-evaluation-harness has no task 'next_wrod': did you mean next_word?"
    )


def test_bad_input_gives_one_message(said, tasks, monkeypatch):
    assert "is not a folder" in said("--tasks", "next_word", "--include-path", tasks / "none")
    assert "--limit needs --tasks" in said("--limit", 3)
    assert "--tasks and --by-source cannot be combined" in said("--tasks", "next_word", "--by-source")
    for other in (("--split", "valid"), ("--tokens-per-batch", 9), ("--by-source",), ("--tasks", "next_word")):
        assert f"--text and {other[0]} cannot be combined" in said("--text", "file", *other)
    assert "--all-stages and --stage cannot be combined" in said("--tasks", "a", "--all-stages", "--stage", 1)
    (tasks / "gone.yaml").write_text(TASK.format(name="gone", data=tasks / "gone.jsonl", body=CHOICE))
    assert "gone cannot be evaluated (FileNotFoundError: " in said("--tasks", "gone", "--include-path", tasks)
    monkeypatch.delitem(sys.modules, "fairseq_alma.evaluation.harness")
    monkeypatch.delattr("fairseq_alma.evaluation.harness")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "--tasks needs lm-evaluation-harness, which is not installed" in said("--tasks", "next_word")
