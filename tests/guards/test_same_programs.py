"""Every process makes the same program: no order of a set is in it.

Processes that run one mesh plan for themselves. Where two order collectives otherwise, or what is
joined in one, they wait for each other for ever, or add up what does not belong together.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_programs_are_the_same_in_whatever_order_sets_are_gone_through():
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.guards.same_programs", str(salt)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(salt)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for salt in (1, 2, 3)
    ]
    said = []
    for run in runs:
        out, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
        said.append(out.splitlines())
    assert len(said[0]) == 5
    assert said[0] == said[1] == said[2]
