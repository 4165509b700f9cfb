"""Tables of the README and the docs say of each program what it sends now."""

import re

import pytest

import meshwise as mw
from benchmarks import loops, operators
from benchmarks.beside import operands
from tests.examples.test_docs import PAGES
from tests.meshes import mesh_of

ROWS = {row.name: row for row in (*operators.TABLE, *loops.TABLE)}
# A program, what GSPMD and Shardy send, what ours does, and the quotient.
LINE = re.compile(r"^\| ([^|]+) \| [\d.,]+ \| [\d.,]+ \| \**([\d.,]+)\** \| [^|]+ \|$", re.M)
TOLD = sorted(
    {
        (name, sent)
        for page in PAGES
        for name, sent in LINE.findall(page.read_text(encoding="utf-8"))
        if name in ROWS
    }
)


def test_there_are_such_tables():
    assert {"cumsum", "Jacobi, 50 steps"} <= {name for name, _ in TOLD}


@pytest.mark.parametrize(("name", "sent"), TOLD)
def test_tables_say_what_is_sent(name, sent):
    row = ROWS[name]
    mesh = mesh_of(**dict(zip("xy", row.mesh, strict=False)))
    step = mw.jit(row.function, mesh=mesh, in_shardings=row.ins, out_shardings=row.outs)
    kib = step.partition(*operands(row)).wire_bytes / 1024
    module = "loops" if row in loops.TABLE else "operators"
    assert sent == (f"{kib:,.1f}" if kib else "0"), f"run benchmarks.{module} for a new row"
