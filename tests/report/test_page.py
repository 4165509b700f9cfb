"""The page of a program: what is on it, that it is whole, and that it loads nothing."""

import html
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.gantt import show_seconds
from meshwise.report.text import kib
from tests.report import programs

MESH = AbstractMesh((2, 4), ("x", "y"))
VOID = ("meta", "rect")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def partitioned(function, *arguments, mesh=MESH, **options):
    return mw.jit(function, mesh=mesh, **options).partition(*arguments)


def megatron(mesh=MESH):
    arguments = (struct(16, 128), struct(128, 512), struct(512, 128))
    return partitioned(
        programs.megatron_mlp, *arguments, mesh=mesh, in_shardings=(P("x"), P(None, "y"), None)
    )


def scanned():
    def layers(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    specs = (P("x", "y"), P(None, "y"))
    return partitioned(layers, struct(16, 64), struct(4, 64, 64), in_shardings=specs)


def by_hand(rows=8):
    return mw.SpmdProgram.from_shard_map(
        lambda x: jax.lax.psum(x, "x") * 2, MESH, P("x"), P(), struct(rows, 4)
    )


PROGRAMS = {
    "a layer": megatron,
    "decisions": lambda: partitioned(
        programs.gradient_of_products,
        *(struct(32, 128), struct(128, 32), struct(64, 32)),
        in_shardings=P(("x", "y")),
        out_shardings=P(("x", "y")),
    ),
    "a loop": scanned,
    "uneven": lambda: partitioned(
        lambda x: jnp.sort(x, 0), struct(13, 4), in_shardings=P("x"), mesh=MESH
    ),
    "no rule": lambda: partitioned(programs.with_unknown, struct(8, 4)),
    "nothing is sent": lambda: partitioned(jnp.sin, struct(8, 4), in_shardings=P("x")),
    "nothing at all": lambda: partitioned(lambda: None),
    "without a plan": by_hand,
    "nothing in what is sent": lambda: by_hand(0),
    "a pipeline": lambda: partitioned(
        mw.pipeline_value_and_grad(
            lambda w, x: (mw.stage_boundary(x @ w) @ w).mean(), axis="x", microbatches=2
        ),
        *(struct(4, 4), struct(8, 4)),
        mesh=AbstractMesh((2,), ("x",)),
    ),
}


class Checked(HTMLParser):
    """Tags that are opened and closed, and what the page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action")]
        if tag in ("script", "link", "iframe", "img"):
            self.loads.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def words(text):
    """The text of HTML, each run of blanks as one."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def rows(page, title):
    """The cells of the table below a title, a list a row; none where there is no such table."""
    _, found, below = page.partition(f"<h2>{title}</h2>")
    body = below.split("<h2>")[0].partition("<tbody>")[2] if found else ""
    return [
        [words(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body)
    ]


SENT = "Collectives, by the bytes that each device sends"


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_page_is_whole_and_loads_nothing(case):
    page = PROGRAMS[case]().to_html()
    parser = Checked()
    parser.feed(page)
    parser.close()
    assert (parser.open, parser.loads) == ([], [])
    assert not re.search(r"https?:|url\(|@import", page)


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_page_says_what_explain_says(case):
    program = PROGRAMS[case]()
    said, text = program.explain(), program.to_html()
    page = words(text)
    figures = said.split("\n\n")[1]
    for line in figures.splitlines():
        assert " ".join(line.split()) in page
    assert {row[3] for row in rows(text, SENT)} == {str(c.kind) for c in program.collectives}
    assert [row[0] for row in rows(text, "Arguments")] == [*program.in_paths]
    assert [row[0] for row in rows(text, "Results")] == [*program.out_paths]
    for taken in re.findall(r"taken   (.*)", said):
        assert taken in page
    assert ("because there is no rule" in page) == ("because there is no rule" in said)


def test_rows_say_what_is_sent_and_how_arguments_lie():
    page = megatron().to_html()
    (sent,) = rows(page, SENT)
    assert sent[:6] == ["6.0", "100.0%", "1", "all_reduce", "y", "f32[8,128]"]
    assert sent[6].endswith("f32[16,128] [x, -] sum over y -> [x, -] for add")
    assert [row[:3] for row in rows(page, "Arguments")] == [
        ["args[0]", "f32[16,128]", "[x, -]"],
        ["args[1]", "f32[128,512]", "[-, y]"],
        ["args[2]", "f32[512,128]", "[y, -]"],
    ]


def test_in_a_loop_nothing_is_computed_while_it_sends():
    program = scanned()
    sent = program.timeline().busy_seconds["link y"]
    page = words(program.to_html())
    assert f"in {show_seconds(sent)} of these nothing is computed" in page
    assert "A loop is drawn as one" in page
    assert "A loop is drawn as one" not in words(megatron().to_html())


def test_lines_of_the_code_stand_beside_what_they_send():
    page = megatron().to_html()
    code = page.split("The lines that send")[1].split("<h2>")[0]
    (row,) = re.findall(r"<tr class=sends>.*?</tr>", code)
    assert kib(megatron().wire_bytes) in row
    assert "hidden @ down" in words(row)
    assert 3 <= code.count("<tr") <= 5


def test_code_that_is_nowhere_is_left_out():
    scope = {"jnp": jnp}
    exec("def summed(x): return x.sum(0)", scope)
    page = partitioned(scope["summed"], struct(8, 4), in_shardings=P("x")).to_html()
    assert "The lines that send" not in page
    assert "all_reduce" in page


def test_the_timeline_ends_with_the_last_event():
    page = megatron().to_html()
    drawn = [
        (float(x), float(width))
        for x, width in re.findall(
            r'<rect class="(?:work|sent)" x="([\d.]+)" y="\d+" width="([\d.]+)"', page
        )
    ]
    assert len(drawn) >= 3
    assert max(x + width for x, width in drawn) == pytest.approx(1000, abs=0.5)
    assert min(x for x, _ in drawn) == pytest.approx(110, abs=0.5)


def test_many_short_events_are_drawn_as_few():
    def chain(x, y):
        for k in range(300):
            x = jnp.sort(x, 0) + k
        return x, y @ y

    page = partitioned(chain, struct(8, 16), struct(4096, 4096)).to_html()
    assert "short ones" in page
    assert page.count('<rect class="work"') < 20


def test_names_are_text():
    def function(x):
        return x["<b>&"].sum()

    function.__name__ = "a<b>&c"
    page = partitioned(function, {"<b>&": struct(8)}, in_shardings=P("x")).to_html()
    assert "<b>" not in page
    assert "a&lt;b&gt;&amp;c" in page
    assert rows(page, "Arguments")[0][0] == "args[0]['<b>&']"
