"""The grid with invented results, which the tests of reports use, too."""

from tests.experiments.report.conftest import finished_job

__all__ = ["finished_job"]
