"""Whether the predictor of a new stage replaces the deployed one (the setting `gate`)."""

import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from fairseq_alma.api import load
from fairseq_alma.core.deployments import stage_in_use
from fairseq_alma.core.files import write_whole
from fairseq_alma.core.ledger import GateCheck, GateDecision, LedgerRow
from fairseq_alma.core.predictors import checked_file, read_predictor
from fairseq_alma.core.printing import json_text, say
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.documents import read_documents, score_documents
from fairseq_alma.evaluation.held_out import scores_of
from fairseq_alma.evaluation.perplexity import PerplexityScore
from fairseq_alma.lm.settings import LanguageModelSettings


def decide(
    settings: LanguageModelSettings, stream: StreamFolder, rows: Sequence[LedgerRow], skipped: Collection[int]
) -> GateDecision:
    """Return whether the predictor of the stage after these rows passes the gate, and deploy it if it passes.

    It is compared with the predictor that is in use where alma-deploy has copied one, which may be older than that in
    predictor.json. If it is refused, that predictor is the one in predictor.json from now on.

    A refusal is printed as a line of JSON, which `gate_command` also reads. If this process is killed before the row of
    the stage is written, the next process repeats all of this.

    Args:
        settings: settings of the run.
        stream: the stream folder.
        rows: the rows of the ledger before the arrival of the stage.
        skipped: the mega-batches that no stage trains on.

    Raises:
        AlmaError: if a checkpoint or a text is missing or damaged.
    """
    run = RunFolder(Path(settings.out))
    t, stage = len(rows), rows[-1].stage + 1
    deployed = stage_in_use(run.path, rows)
    decision = GateDecision(passed=True, deployed=stage, checks=[])
    if deployed:
        checks = _checks(settings, stream, rows, t, deployed, stage, skipped)
        passed = all(check["passed"] for check in checks)
        decision = GateDecision(passed=passed, deployed=stage if passed else deployed, checks=checks)
    write_whole(run.predictor(), run.predictor(decision["deployed"]).read_text(encoding="utf-8"))
    if not decision["passed"]:
        _alert(settings, t, stage, decision)
    return decision


def _checks(
    settings: LanguageModelSettings,
    stream: StreamFolder,
    rows: Sequence[LedgerRow],
    t: int,
    deployed: int,
    stage: int,
    skipped: Collection[int],
) -> list[GateCheck]:
    """Compare the predictors of two stages on all texts of the gate."""
    # A period between the deployed predictor and this stage was refused, so it is not a standard of comparison.
    last_known = next(row.t for row in rows if row.updated and row.stage == deployed)
    last_stage = max(row.t for row in rows if row.updated)
    periods = [j for j in range(1, min(t, stream.num_periods) + 1) if j not in skipped]
    periods = [j for j in periods if stream.counts(f"mega_batch_{j}/valid")["words"]]  # otherwise all was forgotten
    earlier = [f"mega_batch_{j}/valid" for j in periods if j <= last_known] or ["valid"]
    newest = [f"mega_batch_{j}/valid" for j in periods if j > last_stage]
    both: list[dict[str, PerplexityScore]] = []
    own: list[float] = []
    for k in (deployed, stage):
        paths = [checked_file(Path(settings.out), one) for one in read_predictor(Path(settings.out), k)["checkpoints"]]
        both.append(scores_of(paths, stream, [*earlier, *newest], settings.arch))
        if settings.gate_text:
            own.append(_perplexity_of_file(paths, stream, settings))
    assert settings.gate is not None
    limit = 1 + settings.gate
    name = "validation set" if earlier == ["valid"] else "validation text of earlier periods"
    checks = [_check(name, [_perplexity(scores, earlier) for scores in both], limit)]
    if newest:
        checks.append(_check("validation text of the newest periods", [_perplexity(one, newest) for one in both], 1.0))
    if own:
        checks.append(_check(str(settings.gate_text), own, limit))
    return checks


def _check(text: str, perplexities: Sequence[float], limit: float) -> GateCheck:
    deployed, new = perplexities
    # A perplexity that is not a number does not pass.
    return GateCheck(text=text, deployed=deployed, new=new, passed=bool(new <= deployed * limit))


def _perplexity(scores: dict[str, PerplexityScore], splits: Sequence[str]) -> float:
    """Return the perplexity per token over several splits."""
    chosen = [scores[split] for split in splits]
    total = PerplexityScore(sum(one.nll_sum for one in chosen), sum(one.num_tokens for one in chosen), 1)
    return total.perplexity


def _perplexity_of_file(checkpoints: Sequence[Path], stream: StreamFolder, settings: LanguageModelSettings) -> float:
    """Return the perplexity per token on the text of the user. Raise AlmaError if it is empty, or is not UTF-8."""
    documents = read_documents(Path(str(settings.gate_text)), f"gate_text={settings.gate_text}", stream.path)
    return score_documents(load(list(checkpoints), stream=stream.path, arch=settings.arch), documents).perplexity


def _alert(settings: LanguageModelSettings, t: int, stage: int, decision: GateDecision) -> None:
    """Print a refusal, as a line of JSON on stdout and as text on stderr, and run the command of the user."""
    line = json_text({"run": settings.out, "event": "refused", "t": t, "stage": stage, **decision})
    say(line)
    failed = [check for check in decision["checks"] if not check["passed"]]
    why = "; ".join(f"{one['text']}: perplexity {one['new']:.2f} (before: {one['deployed']:.2f})" for one in failed)
    say(
        f"alma-lm: the predictor of stage {stage} is not deployed, that of stage {decision['deployed']} stays: {why}. "
        f"To take the stage back, run `alma-lm rollback {settings.out} --to-stage {stage - 1}`",
        sys.stderr,
    )
    if settings.gate_command:
        done = subprocess.run(["sh", "-c", settings.gate_command], input=line + "\n", text=True, check=False)
        if done.returncode:
            say(f"alma-lm: gate_command= has failed with status {done.returncode}", sys.stderr)
