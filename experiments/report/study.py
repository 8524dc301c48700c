"""The study: which of the paper's orderings hold on small images, as one page with plots.

The functions take values and write files; the caller knows where runs are kept.
"""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from experiments.config.config import DataConfig
from experiments.config.grid import ProtocolName, Trial
from experiments.evaluation.robustness import PROTOCOLS, ROTATION
from experiments.paper.tables import PaperClaim, paper_claims, paper_numbers, paper_rows
from experiments.report import interval
from experiments.report.data import table_rows
from experiments.report.interval import Interval, Spread
from experiments.report.plots import save_plot
from experiments.report.tables import Table
from experiments.runner.grid_run import GridRun, finished_trials
from experiments.runner.progress import trial_count
from experiments.tracking import Result

VERDICTS = CONFIRMED, REVERSED, INCONCLUSIVE, OPEN = "confirmed", "reversed", "inconclusive", "open"
"""Open means that there are not enough seeds yet."""
PROFILE_PAGE = "profile.md"
"""A page of our own beside the study's, to which it links."""


Numbers = Mapping[str, float]
"""The numbers of a trial, or those of a row in the paper: `top1`, or the columns of the paper's table of a protocol."""


def _turned(numbers: Numbers) -> float:
    return statistics.fmean(numbers[f"{condition.name}_top1"] for condition in ROTATION.conditions[1:])


class Score(NamedTuple):
    """A number of a row, in percent or percentage points."""

    words: str
    of: Callable[[Numbers], float]
    sign: int = 1
    """-1 if less is better."""


SCORES: Mapping[str, Score] = {
    "top1": Score("top-1", itemgetter("top1")),
    "turned": Score("mean top-1 after three rotations and a flip", _turned),
    "drop": Score("lost", lambda numbers: round(numbers["none_top1"] - _turned(numbers), 6), sign=-1),
    "none_top1": Score("top-1, unchanged images", itemgetter("none_top1")),
    "clean_top1": Score("top-1, unchanged images", itemgetter("clean_top1")),
    "n2_success": Score("success of attacks in 2 steps", itemgetter("n2_success"), sign=-1),
    "n2_top1": Score("top-1 under them", itemgetter("n2_top1")),
    "n4_success": Score("success of attacks in 4 steps", itemgetter("n4_success"), sign=-1),
    "n4_top1": Score("top-1 under them", itemgetter("n4_top1")),
}
SHOWN: Mapping[ProtocolName, Sequence[str]] = {
    "rotation": ("none_top1", "turned", "drop"),
    "attack": ("clean_top1", "n2_success", "n2_top1", "n4_success", "n4_top1"),
}
"""The scores in the table of a protocol."""


@dataclass(frozen=True, slots=True)
class Section:
    """One of the paper's tables, and what was trained of it."""

    grid_run: GridRun
    results: Mapping[str, Result]
    """By content hash; may hold other grids' too."""

    @property
    def table(self) -> str:
        """The paper's name of it."""
        return str(self.grid_run.grid.table)

    @property
    def claims(self) -> Sequence[PaperClaim]:
        return paper_claims()[self.table]

    @property
    def protocol(self) -> ProtocolName | None:
        """None for an ablation."""
        return self.grid_run.grid.robustness

    @property
    def models(self) -> dict[str, str]:
        """The name of each row's model."""
        return {trial.row: trial.config.model.name for trial in self.grid_run.selected}

    @property
    def finished(self) -> list[tuple[Trial, Result]]:
        return finished_trials(self.grid_run.selected, self.results)

    def by_seed(self, row: str, score: str) -> list[float]:
        """The score of each finished seed of a row."""
        numbers = [self._numbers(result.metrics) for trial, result in self.finished if trial.row == row]
        return [SCORES[score].of(each) for each in numbers]

    def _numbers(self, metrics: Numbers) -> Numbers:
        if self.protocol is None:
            return {"top1": metrics["val/top1"]}
        return {
            f"{condition.name}_{name}": number
            for condition in PROTOCOLS[self.protocol].conditions
            for name, number in condition.numbers_in(metrics).items()
        }

    def in_paper(self, row: str, score: str) -> float:
        """The paper's score of a row."""
        if self.protocol is not None:
            return SCORES[score].of(paper_numbers(self.table)[row])
        top1 = paper_rows(self.table)[row].top1
        assert top1 is not None, "every row of an ablation table has a top-1"
        return top1


@dataclass(frozen=True, slots=True)
class Finding:
    """Our result for one ordering; gaps are differences in percentage points, positive if they agree with the paper."""

    claim: PaperClaim
    paper_gap: float
    gap: Interval | None
    """None if either row has fewer than two finished seeds, or if no row's seeds differ."""

    @property
    def verdict(self) -> str:
        """Follows from the 95 % interval alone."""
        if self.gap is None:
            return OPEN
        if self.gap.low <= 0 <= self.gap.high:
            return INCONCLUSIVE
        return CONFIRMED if self.gap.low > 0 else REVERSED


Spreads = Mapping[tuple[str, str], Spread | None]
"""The standard deviation between seeds, for each score and name of a model, such as `top1` and `san10_pairwise`."""


def spreads_of(sections: Sequence[Section]) -> Spreads:
    """From all rows with the same model; a row that is in several tables counts once."""
    seeds: dict[tuple[str, str], dict[frozenset[str], Sequence[float]]] = {}
    for section in sections:
        for row, model in section.models.items():
            keys = frozenset(trial.key for trial, _ in section.finished if trial.row == row)
            for score in {claim.score for claim in section.claims}:
                seeds.setdefault((score, model), {})[keys] = section.by_seed(row, score)
    return {kind: interval.pooled(rows.values()) for kind, rows in seeds.items()}


def findings(section: Section, spreads: Spreads) -> list[Finding]:
    """The paper's orderings of a section, in the order of its claims."""
    result, models = [], section.models
    for claim in section.claims:
        rows, sign = (claim.better, claim.worse), SCORES[claim.score].sign
        ours = section.by_seed(rows[0], claim.score), section.by_seed(rows[1], claim.score)
        theirs = section.in_paper(rows[0], claim.score) - section.in_paper(rows[1], claim.score)
        gap = interval.of_difference(ours, (spreads[claim.score, models[rows[0]]], spreads[claim.score, models[rows[1]]]))
        result.append(Finding(claim, sign * theirs, gap and replace(gap, middle=sign * gap.middle)))
    return result


def write_study(sections: Sequence[Section], path: Path, train_images: int, val_images: int) -> list[Path]:
    """Writes the page to `path` and `study-<table>.png` beside it; returns all files.

    The sections are of one profile; `train_images` and `val_images` are the sizes of its data.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files, spreads = [path], spreads_of(sections)
    found = [findings(section, spreads) for section in sections]
    page = [_header(sections, [finding for part in found for finding in part], train_images, val_images)]
    for section, orderings in zip(sections, found, strict=True):
        grid, trials = section.grid_run.grid, section.grid_run.trials
        page += [f"## {section.table.capitalize()}", grid.question]
        if section.protocol is None and section.finished:
            files.append(path.with_name(f"study-{section.table}.png"))
            save_plot(grid.plot, trials, table_rows(section.grid_run, section.results), grid.question, files[-1])
            page.append(f"![{grid.question} Our results next to those in the paper]({files[-1].name})")
        if section.protocol is not None:
            page.append(_scores(section))
        page.append(_orderings(orderings))
        trained = {trial.row for trial, _ in section.finished}
        if missing := [row for row in section.models if row not in trained]:
            page.append(f"Not {'trained' if section.protocol is None else 'measured'} yet: {', '.join(missing)}.")
    page.append(_reading(sections, spreads))
    if (path.parent / PROFILE_PAGE).exists():
        page.append(f"[The profile's page]({PROFILE_PAGE}) describes images, discusses reversals and measures longer training.")
    path.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return files


def _header(sections: Sequence[Section], found: Sequence[Finding], train_images: int, val_images: int) -> str:
    ablations = [section for section in sections if section.protocol is None]
    trials = [trial for section in ablations for trial in section.grid_run.trials]
    first, seeds = trials[0], len({trial.seed for trial in trials})
    config = first.config
    resources = config.resources
    cpus, gpus = resources.workers * resources.cpus, resources.workers * resources.gpus
    usual = f"{cpus} CPU{'s'[: cpus > 1]}" + (f" and {gpus:g} GPU{'s'[: gpus > 1]}" if gpus else "")
    hours = defaultdict[str, list[float]](list)
    for result in {trial.key: result for section in ablations for trial, result in section.finished}.values():
        hardware = result.tags.get("hardware") or "CPU"
        seconds = train_images * config.recipe.epochs / result.metrics["summary/images_per_second"]
        hours[usual if hardware == "CPU" else hardware].append(seconds / 3600)
    took = [f"{trial_count(len(each))} took {sum(each):.1f} hours with {name} each" for name, each in hours.items()]
    spent = f"{' and '.join(took)}, without validation and interruptions" if took else "None has ended"
    tested = [section for section in sections if section.protocol is not None]
    missing = [_missing(ablations, "trials"), _missing(tested, "networks in the tables of robustness")]
    command = shlex.join(["san", "study", "--profile", ablations[0].grid_run.request.profile, "--seeds", str(seeds)])
    lacking = f" {' and '.join(filter(None, missing))} are missing;" if any(missing) else ""
    verdicts = Counter(finding.verdict for finding in found)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict] or verdict != OPEN)
    return _paragraphs(f"""\
# The paper's questions on {_dataset(config.data)}

Which orderings of the paper hold for small networks and images? Of {len(found)}: **{counts}.** Those with a † are only in its
tables, not in its text.{lacking} `{command}` trains missing trials and rewrites
this page.

A trial trains on {train_images:,} images of {config.data.size}x{config.data.size} pixels for {config.recipe.epochs} epochs, and
is validated on {val_images:,} after the last one. {spent}.""")


def _missing(sections: Iterable[Section], what: str) -> str:
    """Such as `67 of 145 trials`; empty if none is missing."""
    keys = {trial.key for section in sections for trial in section.grid_run.selected}
    finished = {trial.key for section in sections for trial, _ in section.finished}
    return f"{len(keys - finished)} of {len(keys)} {what}" if keys > finished else ""


def _reading(sections: Sequence[Section], spreads: Spreads) -> str:
    config = sections[0].grid_run.trials[0].config
    stages = getattr(config.model.spec(), "num_stages", None) or 5
    known = [f"{spread.deviation:.2f} for {model}" for (score, model), spread in spreads.items() if spread and score == "top1"]
    estimate = f" ({', '.join(known)})" if known else ""
    return _paragraphs(f"""\
## How to read the verdicts

A gap is a difference in percentage points, of top-1 unless the ordering names something else, with a 95% interval over seeds by
Student's t; the standard deviation between seeds is that of all rows with the same kind of network{estimate}, and for
robustness that of the row itself. An ordering is *confirmed* if the whole interval is above 0, *reversed* if it is below, and
*inconclusive* otherwise; it is *open* until both rows have two
seeds, and their standard deviation is above 0. By chance, about one interval in twenty
misses the true gap. Where the paper says "much better", we test "better", and where it says "similar", nothing. The bars in the
plots, and the intervals in the tables of robustness, are those of single rows, from their own seeds only.

**Limits.** The networks have {stages} of the paper's five stages, and the first stage of a SAN always has a 3x3 footprint.
The last map is {config.data.size >> stages} pixels wide, so large footprints cover most of it. Images, widths and length of
training differ from the paper's. Intervals do not cover the choice of images. A network that is less accurate on unchanged
images has less to lose when they are rotated. A reversed ordering does not contradict the paper's result on ImageNet.""")


def _paragraphs(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in text.split("\n\n"))


def _dataset(data: DataConfig) -> str:
    names = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
    name = Path(data.root or data.source).name
    return names.get(name, name)


def _scores(section: Section) -> str:
    """The table of a protocol; each cell reads *paper / ours*."""
    assert section.protocol is not None

    def cell(row: str, score: str) -> str:
        ours = section.by_seed(row, score)
        words = interval.mean_in_words(statistics.fmean(ours), ours, interval.half_width(ours)) if ours else "-"
        return f"{section.in_paper(row, score):.1f} / {words}"

    scores = SHOWN[section.protocol]
    heading = ["paper / ours, %", *(SCORES[score].words for score in scores)]
    return Table([heading, *([row, *(cell(row, score) for score in scores)] for row in section.models)]).markdown()


def _orderings(orderings: Sequence[Finding]) -> str:
    heading = ("ordering in the paper", "verdict", "gap in the paper", "our gap")
    rows = (
        (f.claim.claim + " †" * (f.claim.source == "table"), f.verdict, f"{f.paper_gap:+.1f}", _gap(f.gap)) for f in orderings
    )
    return Table([heading, *rows], text_columns=2).markdown()


def _gap(gap: Interval | None) -> str:
    """Has one digit more than accuracies, and two more if the interval would seem to end at 0."""
    if gap is None:
        return "not enough seeds"
    digits = 2 if f"{abs(gap.middle):.2f}" != f"{gap.half_width:.2f}" else 3
    return f"{gap.middle:+z.{digits}f} ± {gap.half_width:.{digits}f}"
