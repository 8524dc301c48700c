"""What MLflow's page of an experiment shows: the metric that matters, columns and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence

VIEW = "grid"
"""Name of the view of an experiment's page in its address."""
FIRST = {  # widths in pixels; above 1000 of them a page scrolls on a screen of 1280
    "attributes.`Run Name`": 190,
    "runDateAndNestInfo": 150,  # MLflow's name for `Created`; these two are always there
    **{"metrics.`val/top1`": 90, "metrics.`epoch`": 60, "metrics.`val/top5`": 80},
}
LAST = {
    **{"params.`model.name`": 120, "metrics.`val/loss`": 80, "metrics.`train/loss`": 80, "duration": 80},
    **{"metrics.`params`": 90, "metrics.`flops_paper`": 110, "params.`seed`": 60, "tags.`san.profile`": 100},
}
"""Columns, the first ones first, whose names MLflow would otherwise sort."""
CHARTS = ("val", "train", "summary")
"""Sections of charts, which MLflow would otherwise sort too; others follow."""


def runs_page(experiment_id: str, with_view: bool = True) -> str:
    """Where an experiment's runs are shown; what stands before the # is any page of the same server."""
    view = f"&viewStateShareKey={VIEW}" if with_view else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{view}"


def experiment_tags(measured: Sequence[str]) -> dict[str, str]:
    """Tags of an experiment that MLflow's pages read; the metrics `measured` have columns after those of the validation."""
    widths = FIRST | {f"metrics.`{name}`": 130 for name in measured} | LAST
    section = {"display": True, "isReordered": True, "deleted": False, "isGenerated": True}
    # As MLflow writes it when a view is shared. Sorted by `Created`, cells would hide below their grid.
    view = {
        "selectedColumns": [*widths, "attributes.`Duration`"],
        "columnOrder": [*widths],
        "columnWidths": widths,
        "orderByKey": "metrics.`val/top1`",
        "orderByAsc": False,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [],  # MLflow adds one for each metric
        "compareRunSections": [{"uuid": name, "name": name, **section} for name in CHARTS],
        "isAccordionReordered": True,
    }
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.experiment.primaryMetric.name": "val/top1",
        "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
        f"mlflow.sharedViewState.{VIEW}": json.dumps(view),
    }
