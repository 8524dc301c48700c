"""The study: which of the paper's orderings show on data that anybody can train on, as one page with its pictures.

Values in, files out: whoever calls this knows where runs are kept.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.grid import Grid, Trial
from experiments.report import figures, interval
from experiments.report.interval import Interval
from experiments.report.paper import Claim, paper_claims, paper_rows
from experiments.report.table import ACCURACY, Line, as_markdown, finished_metrics, lines
from experiments.report.text import markdown
from experiments.tracking import Result

SHOWS, REVERSED, CANNOT_BE_TOLD = "shows", "reversed", "cannot be told"
"""Verdicts."""
HEADINGS = {
    SHOWS: "Shown here",
    REVERSED: "Reversed here",
    CANNOT_BE_TOLD: "Cannot be told from these runs",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One of the paper's tables, and what was trained of it."""

    grid: Grid
    trials: Sequence[Trial]
    lines: Sequence[Line]
    top1: Mapping[str, Sequence[float]]
    """Of each row, one value per finished seed."""
    seconds: Mapping[str, float]
    """How long each finished trial took, by content hash."""

    @property
    def table(self) -> str:
        """The paper's name of it."""
        return str(self.grid.table)


@dataclass(frozen=True, slots=True)
class Finding:
    """What our numbers say of one ordering; gaps are differences of top-1 in points, above 0 where the paper is right."""

    claim: Claim
    paper_gap: float
    gap: Interval | None
    """None while either row has fewer than two finished seeds, or where no seed differs from another."""

    @property
    def verdict(self) -> str:
        """Told by the 95 % interval alone."""
        if self.gap is None or self.gap.low <= 0 <= self.gap.high:
            return CANNOT_BE_TOLD
        return SHOWS if self.gap.low > 0 else REVERSED


def section_of(grid: Grid, trials: Sequence[Trial], results: Mapping[str, Result]) -> Section:
    """The section of a grid that is a table of the paper; `results` by content hash may hold other grids' too."""
    assert grid.table is not None, "the study is made of tables of the paper"
    answer = lines(grid, trials, results, paper_rows(grid.table), counts={})
    top1 = {row.id: [metrics["val/top1"] for metrics in finished_metrics(row.id, trials, results)] for row in grid.rows}
    seconds = {t.key: results[t.key].seconds for t in trials if t.key in results and results[t.key].finished}
    return Section(grid, trials, answer, top1, seconds)


def findings(section: Section) -> list[Finding]:
    """The paper's orderings of a section, in the order of its claims."""
    found = []
    printed = {line.id: line.paper_top1 for line in section.lines}
    for claim in paper_claims()[section.table]:
        better, worse = printed[claim.better], printed[claim.worse]
        assert better is not None and worse is not None, "every row of an ablation table has a printed top-1"
        gap = interval.of_difference(section.top1[claim.better], section.top1[claim.worse])
        found.append(Finding(claim, better - worse, gap))
    return found


def write_study(sections: Sequence[Section], path: Path, train_images: int, val_images: int) -> list[Path]:
    """Writes the page to `path` and `study-<table>.png` beside it; returns all files.

    The sections are of one profile; `train_images` and `val_images` are the sizes of its data.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path]
    page = [_header(sections, train_images, val_images), _summary(sections)]
    for section in sections:
        page += [f"## {section.table.capitalize()}", section.grid.question]
        if any(line.top1 is not None for line in section.lines):
            files.append(path.with_name(f"study-{section.table}.png"))
            figures.draw(section.grid.plot, section.trials, section.lines, section.grid.question, files[-1])
            page.append(f"![{section.grid.question} Ours beside the paper's]({files[-1].name})")
        page += [as_markdown(section.lines, ACCURACY), _orderings(findings(section))]
    path.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return files


def _header(sections: Sequence[Section], train_images: int, val_images: int) -> str:
    trials = [trial for section in sections for trial in section.trials]
    first, seeds = trials[0], len({trial.seed for trial in trials})
    config = first.config
    done = sum(line.seeds for section in sections for line in section.lines)
    seconds = {key: spent for section in sections for key, spent in section.seconds.items()}
    placement, model = config.placement, config.model.spec()
    kept = len(model.kept_depths())
    missing = f" Of {len(trials)} cells {len(trials) - done} are not trained yet." if done < len(trials) else ""
    text = f"""\
The tables of the paper's controlled experiments, trained with profile `{first.profile}`
(`experiments/profiles/{first.profile}.yaml`): {train_images} training and {val_images} validation images of
`{config.data.source}` at {config.data.size}x{config.data.size} pixels, {config.recipe.epochs} epochs, {seeds} seeds for every
row.{missing} `san study --profile {first.profile} --seeds {seeds}` trains what is missing and writes this page again. Its
{len(seconds)} different cells took {sum(seconds.values()) / 3600:.1f} hours together, each with {placement.workers} x
{placement.cpus} CPU and {placement.workers} x {placement.gpus} GPU.

`±` is half of a 95 % interval over seeds: of a mean by Student's t, of a gap between two means by Welch's t. It covers the
chance of training, not that of other images. An ordering of the paper *shows* where the whole interval of our gap lies above
0, is *reversed* where it lies below 0, and *cannot be told* where 0 is in it. By chance alone, one interval in twenty misses
the true gap: of some thirty one or two do, and those that end next to 0 are the likeliest. That one setting is *much* better
than another is tested as better. Rows with equal models in several tables are the same runs.

The models keep {kept} stages of the paper's five, of which SAN's first always has a 3x3 footprint, as in the paper: footprints
differ behind it alone. The last map is {config.data.size >> kept} pixels wide: a footprint of twice that less one reaches over
all of it from everywhere. Images are not the paper's: an ordering that is reversed here says
nothing against the paper on ImageNet. Where the paper calls settings similar, or accuracy saturated, there is no ordering to
test."""
    paragraphs = [textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in text.split("\n\n")]
    return "\n\n".join(["# What of the paper shows on small images", *paragraphs])


def _summary(sections: Sequence[Section]) -> str:
    found = [(section.table, finding) for section in sections for finding in findings(section)]
    text = sum(finding.claim.source == "text" for _, finding in found)
    parts = ["## Summary", f"{len(found)} orderings, {text} stated in the paper's text, the others in its tables alone."]
    for verdict, words in HEADINGS.items():
        listed = [f"- {name}: {f.claim.claim} ({_gap(f.gap)})" for name, f in found if f.verdict == verdict]
        parts.append(f"{words}: {len(listed)}.")
        if listed:
            parts.append("\n".join(listed))
    return "\n\n".join(parts)


def _orderings(found: Sequence[Finding]) -> str:
    heading = ("ordering", "stated in", "verdict", "gap paper", "gap ours")
    rows = ((f.claim.claim, f.claim.source, f.verdict, f"{f.paper_gap:+.1f}", _gap(f.gap)) for f in found)
    return markdown([heading, *rows], words=3)


def _gap(gap: Interval | None) -> str:
    """One digit more than accuracies have, so that an interval that ends near 0 is seen on the right side of it."""
    if gap is None:
        return "not enough seeds"
    digits = 2 if f"{abs(gap.middle):.2f}" != f"{gap.half_width:.2f}" else 3  # the reader should see what the verdict saw
    return f"{gap.middle:+.{digits}f} ± {gap.half_width:.{digits}f}"
