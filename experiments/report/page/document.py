"""The page as a whole."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from experiments.report.page.attention import attention
from experiments.report.page.charts import cost, plot
from experiments.report.page.content import Answer
from experiments.report.page.curves import curves
from experiments.report.page.remains import remains
from experiments.report.page.reproduce import reproduce
from experiments.report.page.results import results
from experiments.report.page.robustness import disturbed, robustness

TEMPLATE = Path(__file__).parent / "page.html"


def page(answer: Answer) -> str:
    """The page. Every text that comes from a user is escaped."""
    sections = [
        disturbed(answer),
        remains(answer),
        results(answer),
        plot(answer),
        cost(answer),
        curves(answer),
        attention(answer),
        robustness(answer),
        reproduce(answer),
    ]
    done, cells = len(answer.done()), len(answer.trials)
    state = f"all {cells} cells finished" if done == cells else f"{done} of {cells} cells finished"
    facts = [f"profile {answer.profile}", state]
    if ended := max((result.ended for _, result in answer.done()), default=0):
        facts.append(datetime.fromtimestamp(ended, UTC).strftime("last cell finished %Y-%m-%d %H:%M UTC"))
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{answer.name}: {answer.grid.question}"),
        name=escape(answer.name),
        question=escape(answer.grid.question),
        caption=re.sub("`(.*?)`", r"<code>\1</code>", escape(answer.caption)),
        facts="".join(f"<li>{escape(fact)}</li>" for fact in facts),
        sections="\n".join(filter(None, sections)),
    )
