"""The study: which of the paper's orderings hold on small images, as one page with plots.

The functions take values and write files; the caller knows where runs are kept.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.config.config import DataConfig
from experiments.paper.tables import PaperClaim, paper_claims
from experiments.report import interval
from experiments.report.data import TableRow, table_rows
from experiments.report.interval import Interval, Spread
from experiments.report.plots import save_plot
from experiments.report.tables import Table
from experiments.runner.grid_run import GridRun, finished_trials
from experiments.tracking import Result

VERDICTS = CONFIRMED, REVERSED, INCONCLUSIVE, OPEN = "confirmed", "reversed", "inconclusive", "open"
"""Open means that there are not enough seeds yet."""
PROFILE_PAGE = "profile.md"
"""A page of our own beside the study's, to which it links."""


@dataclass(frozen=True, slots=True)
class Section:
    """One of the paper's tables, and what was trained of it."""

    grid_run: GridRun
    results: Mapping[str, Result]
    """By content hash; may hold other grids' too."""
    rows: Sequence[TableRow]

    @property
    def table(self) -> str:
        """The paper's name of it."""
        return str(self.grid_run.grid.table)

    @property
    def models(self) -> dict[str, str]:
        """The name of each row's model."""
        return {trial.row: trial.config.model.name for trial in self.grid_run.trials}


@dataclass(frozen=True, slots=True)
class Finding:
    """Our result for one ordering; gaps are differences of top-1 in points, positive if they agree with the paper."""

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


def section_of(grid_run: GridRun, results: Mapping[str, Result]) -> Section:
    """The section of a grid that is a table of the paper."""
    return Section(grid_run, results, table_rows(grid_run, results))


def spreads_of(sections: Sequence[Section]) -> dict[str, Spread | None]:
    """The standard deviation between seeds for each name of a model, such as `san10_pairwise`, from all rows with this model; a
    row that is in several tables counts once."""
    by_model: dict[str, dict[frozenset[str], Sequence[float]]] = {}
    for section in sections:
        finished = finished_trials(section.grid_run.trials, section.results)
        models = section.models
        for row in section.rows:
            keys = frozenset(trial.key for trial, _ in finished if trial.row == row.id)
            by_model.setdefault(models[row.id], {})[keys] = row.top1_by_seed
    return {model: interval.pooled(rows.values()) for model, rows in by_model.items()}


def findings(section: Section, spreads: Mapping[str, Spread | None]) -> list[Finding]:
    """The paper's orderings of a section, in the order of its claims."""
    result, rows, models = [], {row.id: row for row in section.rows}, section.models
    for claim in paper_claims()[section.table]:
        better, worse = rows[claim.better], rows[claim.worse]
        assert better.paper_top1 is not None and worse.paper_top1 is not None, "every row of an ablation table has a top-1"
        pair = spreads[models[better.id]], spreads[models[worse.id]]
        gap = interval.of_difference((better.top1_by_seed, worse.top1_by_seed), pair)
        result.append(Finding(claim, better.paper_top1 - worse.paper_top1, gap))
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
        if any(row.top1 is not None for row in section.rows):
            files.append(path.with_name(f"study-{section.table}.png"))
            save_plot(grid.plot, trials, section.rows, grid.question, files[-1])
            page.append(f"![{grid.question} Our results next to those in the paper]({files[-1].name})")
        page.append(_orderings(orderings))
        if missing := [row.id for row in section.rows if row.top1 is None]:
            page.append(f"Not trained yet: {', '.join(missing)}.")
    page.append(_reading(sections, spreads))
    if (path.parent / PROFILE_PAGE).exists():
        page.append(f"[The profile's page]({PROFILE_PAGE}) describes images, discusses reversals and measures longer training.")
    path.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return files


def _header(sections: Sequence[Section], found: Sequence[Finding], train_images: int, val_images: int) -> str:
    trials = [trial for section in sections for trial in section.grid_run.trials]
    first, seeds = trials[0], len({trial.seed for trial in trials})
    config = first.config
    finished = [pair for section in sections for pair in finished_trials(section.grid_run.trials, section.results)]
    speeds = {trial.key: result.metrics["summary/images_per_second"] for trial, result in finished}
    hours = sum(train_images * config.recipe.epochs / speed for speed in speeds.values()) / 3600
    resources = config.resources
    cpus, gpus = resources.workers * resources.cpus, resources.workers * resources.gpus
    hardware = f"{cpus} CPU{'s'[: cpus > 1]}" + (f" and {gpus} GPU{'s'[: gpus > 1]}" if gpus else "")
    distinct = len({trial.key for trial in trials})
    missing = f" {distinct - len(speeds)} of {distinct} trials are missing;" if distinct > len(speeds) else ""
    verdicts = Counter(finding.verdict for finding in found)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict] or verdict != OPEN)
    return _paragraphs(f"""\
# The paper's questions on {_dataset(config.data)}

Which orderings of the paper hold for small networks and images? Of {len(found)}: **{counts}.** Those with a † are only in its
tables, not in its text.{missing} `san study --profile {first.profile} --seeds {seeds}` trains missing trials and rewrites
this page.

A trial trains on {train_images:,} images of {config.data.size}x{config.data.size} pixels for {config.recipe.epochs} epochs, and
is validated on {val_images:,} after the last one. {len(speeds)} trials took {hours:.1f} hours with {hardware} each, without
validation and interruptions.""")


def _reading(sections: Sequence[Section], spreads: Mapping[str, Spread | None]) -> str:
    config = sections[0].grid_run.trials[0].config
    stages = getattr(config.model.spec(), "num_stages", None) or 5
    known = [f"{spread.deviation:.2f} for {model}" for model, spread in spreads.items() if spread]
    estimate = f" ({', '.join(known)})" if known else ""
    return _paragraphs(f"""\
## How to read the verdicts

A gap is a difference of top-1 in percentage points, with a 95% interval over seeds by Student's t; the standard deviation
between seeds is that of all rows with the same kind of network{estimate}. An ordering is *confirmed* if the whole interval is
above 0, *reversed* if it is below, and *inconclusive* otherwise; it is *open* until both rows have two seeds. By chance, about
one interval in twenty misses the true gap. Where the paper says "much better", we test "better", and where it says "similar",
nothing. The bars in the plots are intervals of single rows, from their own seeds only.

**Limits.** The networks have {stages} of the paper's five stages, and the first stage of a SAN always has a 3x3 footprint. The
last map is {config.data.size >> stages} pixels wide, so large footprints cover most of it. Images, widths and length of
training differ from the paper's. Intervals do not cover the choice of images. A reversed ordering does not contradict the
paper's result on ImageNet.""")


def _paragraphs(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in text.split("\n\n"))


def _dataset(data: DataConfig) -> str:
    names = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
    name = Path(data.root or data.source).name
    return names.get(name, name)


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
    return f"{gap.middle:+.{digits}f} ± {gap.half_width:.{digits}f}"
