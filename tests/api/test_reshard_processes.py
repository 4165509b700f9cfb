"""Arrays on the devices of two processes under `mw.reshard` and `mw.jit`, checked in each.

Two processes of four CPU devices each do the cases of `reshard_process` one after another; each
case says how many shards each process has afterwards.
"""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SHARDS = {  # how many are in the first and in the second process
    "within": (4, 4),
    "within, other dim": (4, 4),
    "within, uneven": (4, 4),
    "refined": (4, 4),
    "stays": (4, 4),
    "another order": (4, 4),
    "another order, donated": (4, 4),
    "fewer": (2, 2),
    "fewer, replicated": (2, 2),
    "more": (4, 4),
    "unlike processes": (1, 2),
    "fewer, uneven": (1, 2),
    "more, uneven": (4, 4),
    "scalar": (2, 2),
    "no elements": (2, 2),
    "keys": (2, 2),
    "keys, in another order": (4, 4),
    "tree": (8, 8),
    "from one process": (4, 4),
    "from one device": (4, 4),
    "from the host": (4, 4),
    "from the host, uneven": (4, 4),
    "from the host, NaNs": (2, 2),
    "from the host, a number": (2, 2),
    "from the host, keys": (2, 2),
    "from the host, to one process": (4, 4),
    "from each host another": (1, 1),
    "from devices of each": (1, 1),
    "to a program, from devices of each": (1, 1),
    "under mw.jit": (16, 16),
    "under mw.jit, over two axes": (16, 16),
    "under mw.jit, no elements": (4, 4),
    "under mw.jit, no elements, even": (1, 2),
    "under mw.jit, no elements, of the other": (0, 3),
    "as text": (4, 4),
    "simulated": (1, 1),
    "simulated, replicated": (16, 16),
    "NaNs in padding": (4, 4),
    "a NaN": (1, 0),
    "NumPy's in shards": (1, 1),
    "NumPy's in uneven shards": (1, 1),
    "NumPy's on every device": (4, 4),
    "figures of both": (1, 1),
    "figures of the other": (1, 1),
    "times of the other": (1, 1),
    "to one process": (4, 0),
    "to one process, gathered": (4, 0),
    "to one process, other axes": (4, 0),
    "to one process, keys": (4, 0),
    "from one to the other": (0, 4),
}


def run(names, timeout):
    """What both processes say of each case: [process][name]."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.api.reshard_process"]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(port), *names],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()  # what waits for the other process does not end by itself
            process.communicate()
    found = []
    for said, errors in texts:
        lines = [line.split(": ", 1) for line in said.splitlines() if ": " in line]
        found.append(dict(lines))
        assert found[-1], errors[-2000:]
    return found


@pytest.fixture(scope="module")
def said():
    return run([*SHARDS], timeout=120)


@pytest.mark.parametrize("case", SHARDS)
def test_each_process_has_its_shards(said, case):
    assert [process.get(case) for process in said] == [str(n) for n in SHARDS[case]]
