"""The grid with invented results, which the tests of reports use, too."""

from tests.experiments.report.conftest import finished_grid

__all__ = ["finished_grid"]
