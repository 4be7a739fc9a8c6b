"""The models of a run as a language model of lm-evaluation-harness, and the evaluation of a run on tasks.

lm-evaluation-harness finds only models of its own package by name. So `alma-eval RUN --tasks ...` is the command, and a
program gives it an object:

    lm_eval.simple_evaluate(AlmaLM("runs/gmoe", stage=2), tasks=["arc_easy"])

After `import fairseq_alma.evaluation.harness`, the name "alma" is known, too:

    lm_eval.simple_evaluate("alma", "run=runs/gmoe,stage=2", tasks=["arc_easy"])
"""

import logging
import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fairseq_alma.api import LanguagePredictor, load
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.evaluation.devices import CPU_TOKENS, default_devices

logger = logging.getLogger(__name__)

END_OF_DOCUMENT = "</s>"
"""Text in a request that ends a document."""
MAX_SCORES = 1 << 27
"""Maximum number of scores in a forward pass, tokens times entries of the dictionary: 0.5 GB."""

Row = tuple[list[int], int]
"""A sequence of tokens, at most max_length + 1, and how many of its last tokens are scored."""


@register_model("alma")
class AlmaLM(TemplateLM):
    """The models that predict in a run, for lm-evaluation-harness. The probabilities of several are averaged.

    Texts begin after the end of a document, as in training. A text with more tokens than the models were trained on is
    cut as in the ledger: blocks of `max_length` tokens, each with the last token before it as context. So the rolling
    log-likelihood of the test set is that of the ledger.

    Args:
        run: a run folder, or a predictor that `fairseq_alma.load` returns.
        stage: stage after which the models of the run are used. By default, the last one.
        stream: a folder with the tokenizer of the stream. By default, the stream of the run.
        device: device of the models. By default, a GPU if there is one.
        batch_size: number of sequences in a forward pass. By default ("auto"), as many as fit into MAX_SCORES.
        max_batch_size: accepted for lm-evaluation-harness, and ignored.
    """

    def __init__(
        self,
        run: str | Path | LanguagePredictor,
        stage: int | None = None,
        stream: str | Path | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        self.predictor = (
            run if isinstance(run, LanguagePredictor) else load(run, stage, device or default_devices()[0], stream)
        )
        self.max_length = self.predictor.window
        num_tokens = min(CPU_TOKENS, MAX_SCORES // self.predictor.tokenizer.dictionary_size)
        given = "auto" if batch_size is None else str(batch_size)
        self.batch_size = max(1, num_tokens // self.max_length) if given.startswith("auto") else int(given)
        self._device = self.predictor.device

    @property
    def eot_token_id(self) -> int:
        """Id of the end of a document."""
        return self.predictor.tokenizer.eos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text. They begin with the end of a document, unless `add_special_tokens` is False."""
        ids: list[int] = []
        for document in string.split(END_OF_DOCUMENT):
            ids += [self.eot_token_id, *self.predictor.tokenizer.encode(document)]
        return ids[1:] if add_special_tokens is False else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of its continuation. A token that belongs to both counts as context.

        If the last token of the context contains the whole continuation, the continuation is encoded alone.
        """
        before, after = super()._encode_pair(context, continuation)
        return before, after or self.tok_encode(continuation, add_special_tokens=False)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in nats. Every token is scored once."""
        texts = [request.args[0] for request in requests]
        rows = [
            list(self._rows([self.eot_token_id], self.tok_encode(text, add_special_tokens=False))) for text in texts
        ]
        scores = iter(self._score([row for of_text in rows for row in of_text], disable_tqdm))
        found = []
        for request, of_text in zip(requests, rows, strict=True):
            found.append(math.fsum(next(scores)[0] for _ in of_text))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, in nats, and whether each of its tokens is the likeliest.

        Each request has the two texts, the ids of the context and those of the continuation.
        """
        num_cut = sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        if num_cut:
            logger.warning(
                "%d of %d texts have more than %d tokens: the beginning of their context is left out",
                num_cut, len(requests), self.max_length,
            )  # fmt: skip
        rows = [list(self._rows(context, continuation)) for _, context, continuation in requests]
        scores = iter(self._score([row for of_text in rows for row in of_text], disable_tqdm))
        found = []
        for (texts, _, _), of_text in zip(requests, rows, strict=True):
            parts = [next(scores) for _ in of_text]
            found.append((math.fsum(part for part, _ in parts), all(is_likeliest for _, is_likeliest in parts)))
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def _rows(self, context: list[int], continuation: list[int]) -> Iterator[Row]:
        """Yield the sequences that score each token of a continuation once."""
        if len(continuation) <= self.max_length:
            yield [*context, *continuation][-self.max_length - 1 :], len(continuation)
            return
        tokens = [context[-1], *continuation]
        for start in range(0, len(continuation), self.max_length):
            block = tokens[start : start + self.max_length + 1]
            yield block, len(block) - 1

    @torch.inference_mode()
    def _score(self, rows: Sequence[Row], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Return for each sequence the log-probability of its last tokens, and whether they are the likeliest ones."""
        found = [(0.0, True)] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]), reverse=True)
        order = [index for index in order if rows[index][1]]
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        for batch in tqdm(batches, desc="Scoring", disable=disable_tqdm):
            inputs = [torch.tensor(rows[index][0][:-1]) for index in batch]
            scores_BLV = self.predictor.logits(
                pad_sequence(inputs, True, self.predictor.members[0].decoder.dictionary.pad())
            )
            for index, scores_LV in zip(batch, scores_BLV, strict=True):
                tokens, count = rows[index]
                end = len(tokens) - 1
                of_targets = scores_LV[end - count : end].log_softmax(-1)
                targets = torch.tensor(tokens[-count:], device=of_targets.device)
                value = of_targets.gather(1, targets.unsqueeze(1)).double().sum()
                found[index] = float(value), bool((of_targets.argmax(1) == targets).all())
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of the texts `until`."""
        collator = Collator(
            [request.args for request in requests], lambda one: -len(one[0]), group_by="gen_kwargs",
            group_fn=lambda one: one[1],
        )  # fmt: skip
        found: list[str] = []
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm) as progress:
            for number, chunk in enumerate(collator.get_batched(n=self.batch_size)):
                found += self._generate([context for context, _ in chunk], chunk[0][1], seed=number)
                progress.update(len(chunk))
        return collator.get_original(found)

    def _generate(self, contexts: list[str], options: dict[str, Any], seed: int) -> list[str]:
        """Return continuations of some contexts with the same options of generation. `seed` is that of the draws."""
        options = dict(normalize_gen_kwargs(options, default_max_gen_toks=256))
        until = handle_stop_sequences(options.get("until"), eos=END_OF_DOCUMENT)
        choice = {name: options[name] for name in ("top_k", "top_p") if name in options}
        lengths = [1 + len(self.predictor.tokenizer.encode(context)) for context in contexts]
        if num_cut := sum(length > self.max_length for length in lengths):
            logger.warning(
                "%d of %d contexts have more than %d tokens: their beginning is left out",
                num_cut, len(contexts), self.max_length,
            )  # fmt: skip
        written = self.predictor.generate(
            contexts, max_tokens=options["max_gen_toks"], temperature=options.get("temperature", 0.0), seed=seed,
            **choice,
        )  # fmt: skip
        found = [postprocess_generated_text(one.text, until, think_end_token=None) for one in written]
        for context, text in zip(contexts, found, strict=True):
            self.cache_hook.add_partial("generate_until", (context, options), text)
        return found


def find_tasks(names: Sequence[str], include_path: Path | None = None) -> TaskManager:
    """Return a manager of lm-evaluation-harness that knows some tasks, groups or tags.

    Args:
        names: their names.
        include_path: a folder with further task files (YAML). They may name Python functions beside them, which run.

    Raises:
        SettingError: if there is no task with one of the names.
    """
    if include_path is not None and not include_path.is_dir():
        raise SettingError(
            f"--include-path {include_path} is not a folder: give the folder with your task files (*.yaml)"
        )
    if include_path is not None:
        # To read the files of all tasks of lm-evaluation-harness takes seconds.
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else ("`lm_eval ls tasks` lists all tasks, and --include-path adds a folder with tasks of yours")
            )
            raise SettingError(f"lm-evaluation-harness has no task {name!r}: {hint}")
    return manager


def evaluate(
    model: AlmaLM, names: Sequence[str], manager: TaskManager, num_fewshot: int | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the results of a model on tasks, one for each task. See `core.task_scores.TaskScore` for the keys.

    Args:
        model: the model.
        names: names of tasks, groups or tags.
        manager: what `find_tasks` has returned for them.
        num_fewshot: number of solved examples before each question. By default, that of the task.
        limit: number of examples of each task. By default, all.

    Raises:
        RunError: if a task cannot be evaluated, for example because its data are not on this machine.
    """
    try:
        results = lm_eval.simple_evaluate(  # type: ignore[attr-defined]
            model, tasks=list(names), task_manager=manager, num_fewshot=num_fewshot, limit=limit, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
    except Exception as error:  # the libraries that read the data raise exceptions of no common type
        raise RunError(
            f"{', '.join(names)} cannot be evaluated ({type(error).__name__}: {' '.join(str(error).split())}). If the "
            f"data of a task must be downloaded, give the command once with a network"
        ) from error
    assert results is not None  # it is None only in other processes than the first
    return [
        {
            "task": task,
            "metrics": _numbers(results["results"][task], stderr=False),
            "stderr": _numbers(results["results"][task], stderr=True),
            "num_examples": results["n-samples"][task]["effective"],
            "num_fewshot": results["n-shot"][task] or 0,
            **({} if limit is None else {"limit": limit}),
            "lm_eval": lm_eval.__version__,  # type: ignore[attr-defined]
        }
        for task in results["n-samples"]
    ]


def _numbers(values: dict[str, Any], stderr: bool) -> dict[str, float]:
    """Return the metrics of a task, or their standard errors. Metrics that are no finite numbers are left out.

    lm-evaluation-harness calls them METRIC,FILTER and METRIC_stderr,FILTER. The filter "none" is left out.
    """
    found = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if filtered and is_number and metric.endswith("_stderr") == stderr:
            found[metric.removesuffix("_stderr") + ("" if filtered == "none" else f",{filtered}")] = float(value)
    return found
