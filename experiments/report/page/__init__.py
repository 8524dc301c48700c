"""A grid's answer as one HTML page: no script, nothing from elsewhere, so that it can be mailed and read without a network.

`document` puts it together; each of its sections has a file, and `content` is what they tell of.
"""

from __future__ import annotations

from experiments.report.page.attention import MOST_LOOKS
from experiments.report.page.content import Answer, Look, shown_rows
from experiments.report.page.curves import CURVES
from experiments.report.page.document import page

__all__ = ["CURVES", "MOST_LOOKS", "Answer", "Look", "page", "shown_rows"]
