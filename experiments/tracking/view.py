"""The view of an experiment's page in MLflow: primary metric, columns and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence

VIEW = "grid"
"""Name of the view of an experiment's page in its address."""
FIRST = {  # widths in pixels; a total of more than 1000 scrolls on a screen with 1280
    "attributes.`Run Name`": 190,
    "runDateAndNestInfo": 150,  # MLflow's name for `Created`; MLflow always shows these two
    **{"metrics.`val/top1`": 90, "metrics.`epoch`": 60, "metrics.`val/top5`": 80},
}
LAST = {
    **{"params.`model.name`": 120, "metrics.`val/loss`": 80, "metrics.`train/loss`": 80, "duration": 80},
    **{"metrics.`params`": 90, "metrics.`flops_paper`": 110, "params.`seed`": 60, "tags.`san.profile`": 100},
}
"""Columns in the order of the page; without an order, MLflow sorts them by name."""
CHARTS = ("val", "train", "summary")
"""Sections of charts in the order of the page, followed by others."""


def runs_page(experiment_id: str, with_view: bool = True) -> str:
    """Address of an experiment's runs, relative to any page of the server."""
    view = f"&viewStateShareKey={VIEW}" if with_view else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{view}"


def experiment_tags(own: Sequence[str]) -> dict[str, str]:
    """Tags of an experiment that configure MLflow's pages. The columns `own` follow those of validation."""
    widths = FIRST | dict.fromkeys(own, 130) | LAST
    section = {"display": True, "isReordered": True, "deleted": False, "isGenerated": True}
    # The format in which MLflow stores a shared view. Sorting by `Created` would list cells below the run of their grid.
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
