"""The suite of benchmarks: its programs are what they say, and its figures are counted right."""

import json
import re
from collections import Counter
from dataclasses import replace
from math import inf, prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.peers import hlo
from benchmarks.suite import __main__ as suite
from benchmarks.suite import contestants, figures, records
from benchmarks.suite.devices import AXES, make_mesh
from benchmarks.suite.every_program import PROGRAMS, chosen, listed
from benchmarks.suite.measure import COLUMNS, HERE, OURS, Measured, Outcome, largest_error, measure
from benchmarks.suite.page import page
from benchmarks.suite.program import GROUPS, Array, Best, Program, X, integers
from benchmarks.suite.programs import large
from benchmarks.suite.programs.reshard import lacking
from benchmarks.suite.tables import HEADS, behind, by_group, cells, not_at_best, wrong_answers
from benchmarks.suite.work import flops


def is_array(leaf):
    return isinstance(leaf, Array)


def test_programs_are_many_and_of_every_group():
    counts = Counter(program.group for program in PROGRAMS)
    assert tuple(counts) == GROUPS
    assert sum(counts.values()) >= 120
    assert min(counts.values()) >= 10
    names = Counter((program.group, program.name) for program in PROGRAMS)
    assert not [name for name, n in names.items() if n > 1]


EVERY = (*PROGRAMS, *large.TABLE)


@pytest.mark.parametrize("program", EVERY, ids=lambda p: f"{p.group}: {p.name}")
def test_program_is_well_formed(program):
    arrays = jax.tree.leaves(program.arguments, is_leaf=is_array)
    assert prod(program.mesh) == 8
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.arguments, is_leaf=is_array
    )
    results = jax.eval_shape(contestants.one_device(program), *structs)
    specs = contestants.broadcast(program.results, results)
    placed = [(a.shape, a.spec) for a in arrays]
    placed += [
        (r.shape, s)
        for r, s in zip(
            jax.tree.leaves(results),
            jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P)),
            strict=True,
        )
    ]
    for shape, spec in placed:
        assert len(spec) <= len(shape), (shape, spec)
        used = [a for e in spec for a in ((e,) if isinstance(e, str) else e or ())]
        assert set(used) <= set(AXES[: len(program.mesh)])
        assert len(used) == len(set(used))
    assert program.best is None or program.best.why


def doubled(x):
    return jnp.sin(x) * 2


UNEVEN = Program("matmul", "uneven", doubled, (Array((13, 3), X),), X)
ROLL = Program("reshape", "roll", lambda x: jnp.roll(x, 1), (Array((64,), X),), X,
               best=Best(4, "one number to the next"))  # fmt: skip


def test_uneven_program_for_xla_moves_nothing_of_its_own():
    args = contestants.operands(UNEVEN)
    found = contestants.xla(UNEVEN, args)
    assert hlo.read(found.function.lower(*found.args)).collectives == ()
    result = np.asarray(found.function(*found.args))
    assert result.shape == (16, 3)
    np.testing.assert_allclose(result[:13], doubled(args[0]), rtol=1e-6)


def test_uneven_program_of_ours_takes_what_is_in_place():
    args = contestants.operands(UNEVEN)
    found = contestants.ours(UNEVEN, args)
    assert found.args[0].padded.shape == (16, 3)
    np.testing.assert_allclose(np.asarray(found.function(*found.args)), doubled(args[0]), rtol=1e-6)


def test_measure_hints_inside_reach_every_column():
    def there_and_back(shard, x):
        return shard(jnp.cos(x), P()) + 1

    program = Program("reshard", "gathered inside", there_and_back,
                      (Array((64, 8), X),), X, hinted=True)  # fmt: skip
    outcomes = measure(program).outcomes
    for column in COLUMNS:
        assert outcomes[column].kinds == {"all_gather": 1}, column
        assert outcomes[column].sent == 7 / 8 * 64 * 8 * 4
        assert outcomes[column].error < 1e-6
        assert outcomes[column].compile_s > 0
    assert outcomes[OURS].read_back == outcomes[OURS].sent


def test_measure_times_every_column():
    outcomes = measure(ROLL, repeats=2).outcomes
    assert all(outcomes[column].run_s > 0 for column in COLUMNS)
    assert outcomes[OURS].sent == 4


def test_operands_are_the_same_in_every_run_and_below_their_bound():
    program = replace(ROLL, arguments=(Array((5,)), integers((200,), 7)))
    (x, i), (y, _) = (contestants.operands(program) for _ in range(2))
    assert np.array_equal(x, y)
    assert i.dtype == np.int32
    assert set(i) == set(range(7))


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        (P("x"), P(), 7 / 8 * 512),
        (P("x"), P(None, "x"), 7 / 8 * 64),
        (P(), P("x"), 0),
        (P("x"), P("x"), 0),
    ],
)
def test_lacking(source, target, sent):
    assert lacking((16, 32), source, target, (8,)) == 4 * sent


def test_lacking_of_turned_blocks():
    # On 2x4 a device that is on no diagonal has nothing of its new part.
    assert lacking((16, 32), P("x", "y"), P("y", "x"), (2, 4)) == 4 * 64


def counted(function, *args):
    return flops(hlo.partitioned_text(jax.jit(function).lower(*args)))


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (lambda a, b: a @ b, ((6, 5), (5, 3)), 2 * 6 * 5 * 3),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), ((2, 6, 5), (2, 5, 3)), 2 * 2 * 6 * 5 * 3),
        (lambda a: jnp.exp(a) + a, ((7, 3),), 2 * 21),
        (lambda a: a.sum(0), ((7, 3),), 6 * 3),
        (lambda a: jnp.where(a > 0, a, 0).T[::2], ((7, 3),), 0),
        (
            lambda x, w: lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            ((2, 8, 8, 4), (3, 3, 4, 5)),
            2 * 2 * 8 * 8 * 5 * 3 * 3 * 4,
        ),
        (
            lambda x, w: lax.scan(lambda h, _: (h @ w, None), x, None, length=5)[0],
            ((4, 3), (3, 3)),
            5 * 2 * 4 * 3 * 3,
        ),
        (lambda x: jnp.fft.fft(lax.complex(x, x)), ((3, 64),), (5 * 6 + 4) * 3 * 64),
        (jnp.fft.rfft, ((3, 64),), 2.5 * 3 * 64 * 6),
        (lambda x: jnp.fft.irfft(lax.complex(x, x)), ((3, 33),), 2.5 * 3 * 64 * 6 + 4 * 99),
    ],
    ids="dot batch elementwise reduce moves conv scan fft rfft irfft".split(),
)
def test_flops(function, shapes, wanted):
    assert counted(function, *(numbers(*shape) for shape in shapes)) == wanted


def test_flops_are_a_devices():
    mesh = make_mesh((8,))
    placed = jax.device_put(numbers(16, 4), jax.NamedSharding(mesh, X))
    assert counted(jnp.tanh, placed) == 16 * 4 / 8


def test_flops_of_what_is_joined():
    """Of a sum over devices, and of updates that are added up or overwrite, in any type."""
    mesh = make_mesh((8,))
    placed = jax.device_put(numbers(16, 4), jax.NamedSharding(mesh, X))
    assert counted(lambda x: x.sum(0), placed) == 4 + 4 * 7 / 8
    columns = jax.NamedSharding(mesh, P(None, "x"))
    for dtype in (jnp.float32, jnp.int32):
        given = jax.device_put((jnp.zeros((9, 16), dtype), jnp.ones((5, 16), dtype)), columns)
        places = jax.device_put(jnp.arange(5), jax.NamedSharding(mesh, P()))
        assert counted(lambda t, u, p: t.at[p].add(u), *given, places) == 5 * 2
        assert counted(lambda t, u, p: t.at[p].max(u), *given, places) == 5 * 2
        assert counted(lambda t, u, p: t.at[p].set(u), *given, places) == 0


def outcome(**values):
    given = {"sent": 100.0, "flops": 1e6, "memory": 10**6, "compile_s": 1.0, "run_s": 1.0}
    return Outcome(**{**given, **values})


def measured(best=None, shardy=None, gspmd=None, **ours):
    columns = {"shardy": outcome(**(shardy or {})), "gspmd": outcome(**(gspmd or {}))}
    here = outcome(**ours)
    return Measured(replace(ROLL, best=best), {**columns, OURS: outcome(**ours), HERE: here})


def test_ratios_are_to_the_better_of_the_two_peers():
    found = figures.ratios(measured(shardy={"sent": 300.0}, gspmd={"sent": 200.0, "memory": 1}))
    assert found["bytes"] == 2.0
    assert found["memory"] == figures.SMALL_BYTES / 10**6


def test_what_is_wrong_is_no_peer():
    one = measured(shardy={"sent": 300.0}, gspmd={"sent": 50.0, "error": 1.0})
    assert figures.ratios(one)["bytes"] == 3.0
    both = measured(shardy={"error": inf}, gspmd={"error": 1.0}, memory=10**9)
    assert figures.ratios(both) == {}
    assert figures.losses(both) == []


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ({}, []),
        ({"sent": 101.0}, ["bytes"]),
        ({"memory": 1_100_000}, ["memory"]),
        ({"flops": 1.03e6}, ["flops"]),
        ({"run_s": 1.2}, ["run here"]),
        ({"compile_s": 9.0}, []),
        ({"error": 1e-2}, ["numbers"]),
        ({"error": inf}, ["numbers"]),
        ({"failed": "Traceback"}, ["failed"]),
    ],
)
def test_losses(values, lost):
    assert figures.losses(measured(**values)) == lost


def test_memory_of_little_is_no_loss():
    little = {"memory": 0}
    assert figures.losses(measured(shardy=little, gspmd=little, memory=4000)) == []


def summarised(rows):
    return {figure.name: figure for figure in figures.summary(rows)}


def test_summary_counts():
    far = Best(50.0, "half of it")
    rows = [
        measured(sent=50.0, best=far),
        measured(sent=100.0, best=far, gspmd={"error": 1.0}),
        measured(sent=0.0),
        measured(sent=400.0),
    ]
    found = summarised(rows)
    sent = found["wire bytes, XLA / ours"]
    assert not sent.reached
    assert sent.value == (
        "geomean 0.79 over 3, 1 where only XLA sends, 1 where ours sends more"
    )  # the cube root of 2 * 1 / 4
    assert found["at the best known bytes, where XLA is over 1.2x"].value == "1 of 2"
    assert found["wrong answers"].value == "ours 0, Shardy 0, GSPMD 1"
    assert found["wrong answers"].reached


def test_largest_error():
    wanted = {"a": np.array([1.0, -4.0]), "b": np.array([True, False])}
    assert largest_error({"a": np.array([1.0, -3.0]), "b": np.array([True, False])}, wanted) == 0.25
    assert largest_error({"a": np.array([1.0, -4.0]), "b": np.array([True, True])}, wanted) == 1
    assert (
        largest_error({"a": np.array([1.0, np.nan]), "b": np.array([True, False])}, wanted) == inf
    )
    assert largest_error(np.array([np.nan, 1, 9]), np.array([np.nan, 1])) == 0  # cut, NaN kept


def test_page_is_one_file_that_says_everything():
    rows = [
        measured(sent=0.0),
        measured(error=inf, best=Best(3.0, "a <!--<script></script> in a reason")),
    ]
    text = page(records.record(rows, figures.summary(rows), records.machine(1.0, 3)))
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)", text)
    inside = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    found = json.loads(inside[1])
    assert [row["losses"] for row in found["rows"]] == [[], ["numbers"]]
    assert found["rows"][0]["ratios"]["bytes"] == "inf"
    assert found["rows"][1]["best"]["why"] == "a <!--<script></script> in a reason"


def test_record_is_read_back():
    rows = [measured(ROLL.best, error=inf), measured(ROLL.best, failed="Traceback")]
    written = json.loads(
        json.dumps(records.record(rows, figures.summary(rows), records.machine(1.0, 3)))
    )
    assert records.read(written, [ROLL]) == rows
    assert records.read(written, [UNEVEN]) == []


def test_cells_fit_their_heads():
    row = measured(best=Best(2048.0, "two KiB"), gspmd={"failed": "Traceback"})
    assert len(cells(row)) == len(HEADS)
    assert cells(row)[3] == "failed"
    assert cells(row)[5] == "2.0"


def test_what_xla_reads_otherwise_is_said():
    as_said, otherwise = measured(read_back=100.0), measured(read_back=45024.0, sent=1120.0)
    assert cells(as_said)[4] == "0.0977"
    assert cells(otherwise)[4] == "1.1 read as 44.0"
    rows = [as_said, otherwise, measured(read_back=9.0, failed="Traceback")]
    found = records.record(rows, figures.summary(rows), records.machine(1.0, 3))["rows"]
    assert [row["read_otherwise"] for row in found] == [[], [OURS, HERE], []]


def lines_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_tables_for_a_page():
    far = Best(50.0, "half of it")
    rows = [
        measured(best=far, gspmd={"error": 0.5}),
        measured(best=far, sent=400.0),
        measured(flops=2e6, memory=10**7),
    ]
    assert lines_of(wrong_answers(rows)) == [["roll", "0", "0.5", "0"]]
    assert [line[1] for line in lines_of(behind(rows, ("bytes", "flops", "memory")))] == [
        "memory 0.10, flops 0.50",
        "bytes 0.25",
    ]
    assert lines_of(behind(rows, ("flops",)))[0][1] == "flops 0.50"
    assert [line[2] for line in lines_of(not_at_best(rows))] == ["0.0977"]  # the lost one is above
    assert lines_of(by_group(rows))[0][:3] == ["reshape", "3", "0.63"]  # the cube root of 1/4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--programs", "nosuch"], "has 'nosuch' in its name"),
        (["--groups", "moe", "--programs", "Cannon"], "no program of moe has 'Cannon'"),
        (["--saved", "nosuch.json"], "no such file: nosuch.json"),
        (["--from", "nosuch.py"], "no such file: nosuch.py"),
    ],
)
def test_what_there_is_not_is_said(asked, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks.suite", *asked])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert said in f"{ended.value} {capsys.readouterr().err}"


def test_programs_of_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from benchmarks.suite.program import X, Array, Program\n"
        "PROGRAMS = [Program('matmul', 'mine', lambda x: 2 * x, (Array((8, 4), X),), X)]\n"
    )
    assert [p.name for p in chosen(["matmul"], ["min"], listed(path))] == ["mine"]
    assert listed(None) is PROGRAMS
