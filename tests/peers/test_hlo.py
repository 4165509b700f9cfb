"""XLA's collectives, read from recorded lines."""

import pytest

from benchmarks.peers import hlo
from benchmarks.peers.hlo_text import Shape, parse_instruction, parse_shapes
from benchmarks.peers.replica_groups import parse_groups, parse_pairs


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x=1", ((0, 1), (2, 3))),
        ("replica_groups={{0, 4}, {1, 5}}", ((0, 4), (1, 5))),
        ("replica_groups={}, to_apply=%add", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("channel_id=1, dimensions={0}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8], use", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'y','x'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], "
            "device_ids=([2,4]T(1,0)) {'axis_0'}, dimensions={1}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], "
            "device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}, dimensions={0}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}",
            ((3, 1), (2, 0)),
        ),
    ],
)
def test_replica_groups(text, groups):
    assert parse_groups(text, 8) == groups


def test_source_target_pairs():
    text = "channel_id=1, source_target_pairs={{0,0},{2,4},{1,1}}, metadata={}"
    assert parse_pairs(text) == ((0, 0), (2, 4), (1, 1))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("f32[8,16]{1,0}", [512]),
        ("bf16[3,5]", [30]),
        ("pred[7]{0}", [7]),
        ("f8e4m3fn[16]", [16]),
        ("s4[7]", [4]),
        ("c64[2]", [16]),
        ("f32[]", [4]),
        ("token[]", [0]),
        ("f32[<=4,2]", [32]),
        ("(s32[], f32[2,2]{1,0:T(8,128)}, /*index=2*/(u8[3], bf16[1]))", [4, 16, 3, 2]),
    ],
)
def test_shapes(text, sizes):
    assert [shape.size for shape in parse_shapes(text)] == sizes


def test_instruction_with_a_tuple_and_quoted_parentheses():
    line = (
        "(f32[4]{0}, (f32[8]{0}, u32[])) custom-call(%a.1, f32[4]{0} %b), index=3, calls=%body, "
        'metadata={op_name="jit(f)/while (x" stack_frame_id=2}'
    )
    instruction = parse_instruction("c", line)
    assert instruction.opcode == "custom-call"
    assert instruction.shapes == (Shape("f32", (4,)), Shape("f32", (8,)), Shape("u32", ()))
    assert instruction.operands == ("a.1", "b")
    assert instruction.called == ("body",)
    assert instruction.attribute("index") == "3"
    assert instruction.op_name == "jit(f)/while (x"


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def module(*lines: str, before: str = "", partitions: int = 8) -> str:
    """Text of a module whose entry has some lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, num_partitions={partitions}\n{ADD}{before}\n"
        f"ENTRY %main (p: f32[8,16]) -> f32[8,16] {{\n{body}\n}}\n"
    )


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        (
            "f32[32,16] all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}",
            "all_gather",
            1536,
        ),
        ("f32[8,16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all_reduce", 768),
        ("f32[2,16] reduce-scatter(%p), replica_groups=[2,4]<=[8]", "reduce_scatter", 384),
        ("f32[8,16] all-to-all(%p), replica_groups=[2,4]<=[8]", "all_to_all", 384),
        ("f32[8,16] collective-permute(%p), source_target_pairs={{0,1},{1,0}}", "ppermute", 512),
        ("f32[8,16] collective-permute(%p), source_target_pairs={{0,0},{1,1}}", "ppermute", 0),
        (
            "(f32[8,16], f32[8,16]) collective-permute(%p, %p), source_target_pairs={{0,1},{1,0}}",
            "ppermute",
            1024,
        ),
        ("f32[8,16] all-reduce(%p), replica_groups={{0},{1}}, to_apply=%add", "all_reduce", 0),
    ],
)
def test_wire_bytes_of_each_kind(line, kind, sent):
    report = hlo.parse(module("%p = f32[8,16] parameter(0)", f"ROOT %r = {line}"))
    assert [(c.kind, c.wire_bytes, c.count) for c in report.collectives] == [(kind, sent, 1)]


def test_asynchronous_chains_count_once():
    report = hlo.parse(
        module(
            "%p = f32[8,16] parameter(0)",
            "%s = (f32[8,16], f32[32,16]) all-gather-start(%p), replica_groups=[2,4]<=[8]",
            "%d = f32[32,16] all-gather-done(%s)",
            "%as = ((f32[8,16]), f32[2,16], u32[]) async-start(%p), calls=%wrapped",
            "%au = ((f32[8,16]), f32[2,16], u32[]) async-update(%as), calls=%wrapped",
            "ROOT %ad = f32[2,16] async-done(%au), calls=%wrapped",
            before="""
%wrapped (q: f32[8,16]) -> f32[2,16] {
  %q = f32[8,16] parameter(0)
  ROOT %rs = f32[2,16] reduce-scatter(%q), replica_groups=[2,4]<=[8], to_apply=%add
}
""",
        )
    )
    assert report.by_kind == {"all_gather": 1, "reduce_scatter": 1}
    assert report.wire_bytes == 1536 + 384


def test_a_collective_beside_fusions_counts_once():
    """On TPUs each fusion that a gather runs beside holds it; the first is called its start."""
    gather = 'replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}'
    part = """
%NAME (q: f32[8,16]) -> f32[32,16] {
  %q = f32[8,16] parameter(0)
  ROOT %ag = f32[32,16] all-gather(%q), GATHER
}
"""
    parts = [part.replace("NAME", n).replace("GATHER", gather) for n in ("first", "then", "last")]
    report = hlo.parse(
        module(
            "%p = f32[8,16] parameter(0)",
            "%async-collective-start.2 = f32[32,16] fusion(%p), kind=kCustom, calls=%first",
            "%fusion.3 = f32[32,16] fusion(%p), kind=kOutput, calls=%then",
            "ROOT %async-collective-done.2 = f32[32,16] fusion(%p), kind=kCustom, calls=%last",
            before="".join(parts),
        )
    )
    assert report.by_kind == {"all_gather": 1}
    assert report.wire_bytes == 1536


def test_variadic_collectives_sum_their_operands():
    report = hlo.parse(
        module(
            "%p = f32[8,16] parameter(0)",
            "%h = bf16[4] parameter(1)",
            "ROOT %r = (f32[8,16], bf16[4]) all-reduce(%p, %h), replica_groups=[2,4]<=[8], "
            "to_apply=%add",
        )
    )
    (found,) = report.collectives
    assert found.shapes == ((8, 16), (4,))
    assert found.dtypes == ("f32", "bf16")
    assert found.wire_bytes == 1.5 * (512 + 8)


LOOP = """
%cond (c: (s32[], f32[8,16])) -> pred[] {
  %c = (s32[], f32[8,16]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(LIMIT)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%body (c: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %c = (s32[], f32[8,16]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(2)
  %next = s32[] add(%i, %one)
  %x = f32[8,16] get-tuple-element(%c), index=1
  %r = f32[8,16] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8,16]) tuple(%next, %r)
}
"""


@pytest.mark.parametrize(
    ("limit", "noted", "trips"),
    [("9", "", 4), ("10", "", 5), ("9", 'backend_config={"known_trip_count":{"n":"7"}}', 7)],
)
def test_trips_are_counted(limit, noted, trips):
    report = hlo.parse(looping(limit, "constant(1)", noted))
    assert report.by_kind == {"all_reduce": trips}
    assert report.wire_bytes == 768 * trips
    assert not report.unknown_trips


@pytest.mark.parametrize(
    ("direction", "step", "first", "limit", "trips"),
    [
        ("LE", "2", "1", "9", 5),
        ("LE", "2", "1", "10", 5),
        ("LT", "2", "9", "9", 0),
        ("LE", "2", "9", "9", 1),
        ("GT", "-2", "9", "1", 4),
        ("GT", "-2", "9", "0", 5),
        ("GE", "-2", "9", "1", 5),
        ("GE", "-2", "9", "0", 5),
        ("GE", "-2", "0", "1", 0),
        ("NE", "2", "1", "9", 4),
        ("NE", "-2", "9", "1", 4),
        ("NE", "2", "9", "9", 0),
    ],
)
def test_trips_are_counted_up_and_down(direction, step, first, limit, trips):
    text = looping(limit, f"constant({first})", "").replace("constant(2)", f"constant({step})")
    turned = {"LE": "GE", "LT": "GT", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
    down = str(-int(step))
    for same in (
        text.replace("direction=LT", f"direction={direction}"),
        text.replace("compare(%i, %n), direction=LT", f"compare(%n, %i), direction={turned}"),
        text.replace("direction=LT", f"direction={direction}")
        .replace("add(%i, %one)", "subtract(%i, %one)")
        .replace(f"%one = s32[] constant({step})", f"%one = s32[] constant({down})"),
    ):
        report = hlo.parse(same)
        assert not report.unknown_trips
        assert report.wire_bytes == 768 * trips


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("direction=LT", "direction=NE"),  # steps over it
        ("direction=LT", "direction=EQ"),
        ("direction=LT", "direction=GE"),  # goes away
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("add(%i, %one)", "subtract(%one, %i)"),
        ("%n = s32[] constant(4)", "%n = f32[] constant(4.5)"),
    ],
)
def test_a_comparison_that_does_not_count_is_named(before, after):
    text = looping("4", "constant(1)" if "GE" not in after else "constant(7)", "")
    assert before in text
    report = hlo.parse(text.replace(before, after))
    assert report.unknown_trips == ("w",)
    assert report.by_kind == {"all_reduce": 1}


def test_a_loop_that_cannot_be_counted_is_named():
    report = hlo.parse(looping("9", "parameter(1)", ""))
    assert report.unknown_trips == ("w",)
    assert report.by_kind == {"all_reduce": 1}


def test_a_counter_that_is_copied_is_followed():
    text = looping("9", "constant(1)", "").replace(
        "%next = s32[] add(%i, %one)", "%j = s32[] copy(%i)\n  %next = s32[] add(%j, %one)"
    )
    assert hlo.parse(text).by_kind == {"all_reduce": 4}


def test_what_a_condition_sends_is_counted():
    text = looping("9", "parameter(1)", "").replace(
        "  ROOT %lt",
        "  %all = s32[] all-reduce(%i), replica_groups=[1,8]<=[8], to_apply=%add\n  ROOT %lt",
    )
    assert hlo.parse(text).by_kind == {"all_reduce": 2}
    assert hlo.parse(text).wire_bytes == 768 + 7


def looping(limit: str, first: str, noted: str) -> str:
    return module(
        "%p = f32[8,16] parameter(0)",
        f"%zero = s32[] {first}",
        "%t = (s32[], f32[8,16]) tuple(%zero, %p)",
        f"%w = (s32[], f32[8,16]) while(%t), condition=%cond, body=%body, {noted}",
        "ROOT %r = f32[8,16] get-tuple-element(%w), index=1",
        before=LOOP.replace("LIMIT", limit),
    )


REDUCED = (
    "%p = f32[8,16] parameter(0)",
    "%ar = f32[8,16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add",
    "%id = u32[] partition-id()",
    "%zero = s32[] constant(0)",
)


def start(table: str) -> tuple[str, ...]:
    """Lines that look a device's start up: %at."""
    return (
        f"%table = s32[8] constant({table})",
        "%row = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}",
        "%at = s32[] reshape(%row)",
    )


@pytest.mark.parametrize(
    ("table", "part", "credited"),
    [
        ("{0, 2, 4, 6, 0, 2, 4, 6}", 2, 384),  # a part each: a reduce-scatter
        ("{0, 0, 4, 4, 0, 0, 4, 4}", 4, 256 + 256),  # two parts: half scatter, half reduce
        ("{0, 0, 0, 0, 4, 4, 4, 4}", 4, 768),  # the same part in a group: the all-reduce it was
        ("{0, 1, 2, 3, 0, 1, 2, 3}", 5, 768),  # parts that overlap are no parts
    ],
)
def test_per_device_slices_are_credited(table, part, credited):
    lines = (
        *REDUCED,
        *start(table),
        "%b = f32[8,16] bitcast(%ar)",
        f"ROOT %r = f32[{part},16] dynamic-slice(%b, %at, %zero)",
    )
    report = hlo.parse(module(*lines))
    assert (report.wire_bytes, report.credited_bytes) == (768, credited)


def test_slices_in_a_fusion_and_computed_starts_are_credited():
    inner = """
%fused (x: f32[8,16], i: s32[]) -> bf16[2,16] {
  %x = f32[8,16] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %y = bf16[8,16] convert(%x)
  ROOT %cut = bf16[2,16] dynamic-slice(%y, %i, %z), dynamic_slice_sizes={2,16}
}
"""
    lines = (
        *REDUCED,
        "%four = u32[] constant(4)",
        "%place = u32[] remainder(%id, %four)",
        "%signed = s32[] convert(%place)",
        "%two = s32[] constant(2)",
        "%at = s32[] multiply(%signed, %two)",
        "ROOT %r = bf16[2,16] fusion(%ar, %at), kind=kLoop, calls=%fused",
    )
    assert hlo.parse(module(*lines, before=inner)).credited_bytes == 384


@pytest.mark.parametrize(
    "user",
    [
        "%n = f32[8,16] negate(%ar)",  # another user needs it whole
        "%n = f32[2,16] dynamic-slice(%ar, %two, %zero), dynamic_slice_sizes={2,16}",
        "%n = f32[2,16] dynamic-slice(%ar, %given, %zero), dynamic_slice_sizes={2,16}",
    ],
)
def test_anything_else_that_reads_it_forfeits_the_credit(user):
    lines = (
        *REDUCED,
        *start("{0, 2, 4, 6, 0, 2, 4, 6}"),
        "%two = s32[] constant(2)",
        "%given = s32[] parameter(1)",
        user,
        "ROOT %r = f32[2,16] dynamic-slice(%ar, %at, %zero), dynamic_slice_sizes={2,16}",
    )
    assert hlo.parse(module(*lines)).credited_bytes == 768


def test_the_dearest_branch_counts():
    branches = """
%cheap (x: f32[8,16]) -> f32[8,16] {
  ROOT %x = f32[8,16] parameter(0)
}
%dear (y: f32[8,16]) -> f32[8,16] {
  %y = f32[8,16] parameter(0)
  ROOT %q = f32[8,16] all-to-all(%y), replica_groups=[1,8]<=[8]
}
"""
    report = hlo.parse(
        module(
            "%p = f32[8,16] parameter(0)",
            "%i = s32[] parameter(1)",
            "ROOT %r = f32[8,16] conditional(%i, %p, %p), branch_computations={%cheap, %dear}",
            before=branches,
        )
    )
    assert report.by_kind == {"all_to_all": 1}
