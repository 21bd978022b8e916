"""kill -9 at ten moments, each followed by a rerun: nothing lost, nothing done twice."""  # noqa: E501
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import kills  # noqa: E402


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return kills.campaign(10, 1, tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("fault", kills.FAULTS)
def test_ten_kills_leave_no(table, fault):
    bad = table[table[fault] > 0]
    assert bad.empty, bad.to_string()


def test_the_kills_hit_every_target_in_the_middle_of_its_work(table):
    assert set(table.target) == set(kills.TARGETS)
    assert {"import", "train", "save"} <= set(table.hit)
    others = table[table.target != "worker"]  # where the worker died, the sweep goes on
    assert (others.trained > 0).sum() >= 6 and (others.kept > 0).sum() >= 3
    assert (table[table.target == "worker"].trained == 0).all()
