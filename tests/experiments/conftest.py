"""The report on made-up rows of every ready grid."""

import pytest

import sweep_rows as sr
from coec.experiments.reporting.document import document
from coec.experiments.reporting.frame import read_results


@pytest.fixture(scope="session")
def whole_results(tmp_path_factory):
    """What is read of the rows of all ready grids."""
    return read_results(sr.write(tmp_path_factory.mktemp("whole"), sr.sweep()))


@pytest.fixture(scope="session")
def whole_report(whole_results):
    """The report on them, beside the paper's numbers."""
    return document(whole_results, compare="paper")
