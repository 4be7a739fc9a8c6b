"""The files of a run folder that list the checkpoints of a predictor, with digests: now, and after each stage."""

from pathlib import Path


def predictor_file(stage: int | str | None) -> str:
    """Return the path in a run folder of the file that lists the checkpoints of a predictor.

    Args:
        stage: index of the stage after which it predicted, or the name of the stage's folder; None for the current one.
    """
    if stage is None:
        return "predictor.json"
    return f"predictors/{stage if isinstance(stage, str) else f'stage_{stage:03d}'}.json"


def stages_with_predictor(folder: Path) -> str:
    """Return the stages of a run whose predictors can be used, for messages."""
    names = sorted(
        path.stem.removeprefix("stage_").lstrip("0") for path in (folder / "predictors").glob("stage_*.json")
    )
    return f"predictors of these stages are stored: {', '.join(names)}" if names else "no earlier predictor is stored"
