"""The attention weights that a page shows: those of a few finished trials, for the same pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.config.grid import Trial
from experiments.errors import UnavailableError, UserError
from experiments.evaluation.attention import Attention, compute_attention
from experiments.evaluation.evaluate import open_checkpoint, open_images
from experiments.runs.workspace import Workspace
from experiments.tracking import Result
from experiments.training.checkpoint import last_of, resolve_checkpoint
from pipelines import DataError
from san import CheckpointError
from san.models.san import SANSpec

MOST_SAMPLES = 4
"""Trials on a page; each takes a second, and large networks take several."""


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """The attention weights of a trial's network for one pixel."""

    trial: Trial
    checkpoint: str
    image: int
    """Number of the validation image."""
    attention: Attention | None
    error: str = ""
    """Why there is no attention."""


def best_of_each_kind(finished: Sequence[tuple[Trial, Result]]) -> list[Trial]:
    """The best trial by top-1 of each kind of attention and relation, in order. At most `MOST_SAMPLES`; the best of every kind
    comes before the second best of any."""
    best: dict[tuple[type[SANSpec], str | None], Trial] = {}
    for trial, _ in sorted(finished, key=lambda pair: -pair[1].metrics["val/top1"]):
        spec = trial.config.model.spec()
        if isinstance(spec, SANSpec):
            best.setdefault((type(spec), getattr(spec, "relation", None)), trial)
    seen: Counter[type[SANSpec]] = Counter()
    ranked = []
    for (kind, _), trial in best.items():
        ranked.append((seen[kind], trial))
        seen[kind] += 1
    chosen = [trial for _, trial in sorted(ranked, key=lambda pair: pair[0])[:MOST_SAMPLES]]
    return [trial for trial, _ in finished if trial in chosen]


def attention_samples(workspace: Workspace, finished: Sequence[tuple[Trial, Result]]) -> list[AttentionSample]:
    """Samples of the best finished trials (`best_of_each_kind`), for the center of the middle validation image."""
    epochs = {trial.key: result.epochs(trial.config.recipe.epochs) for trial, result in finished}
    return [_sample(workspace, trial, epochs[trial.key]) for trial in best_of_each_kind(finished)]


def _sample(workspace: Workspace, trial: Trial, epochs: int) -> AttentionSample:
    uri = workspace.uri(last_of(workspace.checkpoints(trial), epochs))
    try:
        with resolve_checkpoint(uri, workspace.runs) as (path, _):
            opened = replace(open_checkpoint(path), config=trial.config)
        images = open_images(opened)
        number = len(images) // 2
        return AttentionSample(trial, uri, number, compute_attention(opened, images.only([number])))
    except (UserError, DataError, CheckpointError, UnavailableError) as error:  # a report is useful without a picture
        return AttentionSample(trial, uri, 0, None, " ".join(str(error).split()))
