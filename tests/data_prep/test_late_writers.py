"""A process of alma-prep that sleeps while another one finishes its stream, and wakes up: it changes nothing."""

import sys
from multiprocessing import forkserver

import pytest

from tests.late_writers import late_writers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="audit events and process states as on Linux")


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 90])
def test_a_process_that_wakes_up_late_changes_nothing(tmp_path, books, alma_prep, folder_bytes, every):
    def run(out):
        forkserver._forkserver.__init__()  # the server that other tests have started is no child of a fork
        if status := alma_prep(out, f"books:{books}"):
            sys.exit(status)

    def same(a, b):
        assert folder_bytes(a) == folder_bytes(b)

    statuses = list(late_writers(run, tmp_path, same, every, first=every // 2))
    print(f"stopped at {len(statuses)} writes; {statuses.count(0)} processes ended with status 0")
    assert len(statuses) > (50 if every == 1 else 0)
