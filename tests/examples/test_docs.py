"""Every Python block of the README and the docs runs, and prints the text block that follows it.

The blocks of a page run in order and share their names. A text block right after a Python block is
its output; `pytest --update-golden` writes it anew. A first line `# name.py` names the file that
the block's source lines are shown under.
"""

import contextlib
import io
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import pytest

import meshwise as mw
from benchmarks.gpt import MESHES, arguments, make_mesh
from examples.gpt import hints
from meshwise.rules.registry import REGISTRY

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n*^```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
# What the gradient of GELU keeps, which is most of what this page shows, is another thing since.
OF_OLDER_JAX = {ROOT / "docs/training.md": (0, 11)}


@dataclass(frozen=True)
class Block:
    """Code of a page, what it should print (None: nothing is said), and where that stands."""

    code: str
    output: str | None
    span: tuple[int, int]


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        yield Block(found["code"], found["output"], found.span("output"))


def run(block: Block, name: str, names: dict[str, object]) -> str:
    """What a block prints."""
    title = re.match(r"# (\S+\.py)\n", block.code)
    file = ROOT / (title[1] if title else f"{name}.py")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.code, str(file), "exec"), names)
    return printed.getvalue()


@EVERY_PAGE
def test_examples_run_and_print_what_they_say(page, monkeypatch, request):
    if jax.__version_info__ >= OF_OLDER_JAX.get(page, (1,)):
        pytest.skip("shows figures of an older JAX")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page.stem}
    printed = [(block, run(block, page.stem, names)) for block in blocks(text)]
    if request.config.getoption("--update-golden"):
        for block, output in reversed(printed):
            if block.output is not None:
                start, end = block.span
                text = text[:start] + output + text[end:]
        page.write_text(text, encoding="utf-8")
        return
    for block, output in printed:
        assert output == (block.output or ""), block.code


@EVERY_PAGE
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for found in LINK.finditer(text):
        target = page.parent / found["path"] if found["path"] else page
        assert target.exists(), found[0]
        if found["anchor"]:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert found["anchor"][1:] in anchors, (found[0], anchors)


@pytest.mark.slow
def test_figures_of_the_readme_are_those_of_the_programs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for scheme in hints.SCHEMES:
        row = next(line for line in text.splitlines() if line.startswith(f"| {scheme.title} "))
        shape, ours = [row.split("|")[k].strip(" *") for k in (2, 5)]
        function, given, returned = hints.hinted_step(scheme, make_mesh(MESHES[shape]))
        step = mw.jit(function, in_shardings=given, out_shardings=returned)
        sent = step.partition(*arguments()).wire_bytes / 1024
        assert ours == f"{sent:,.1f}", f"{scheme.title}: run benchmarks.gpt for a new row"


def test_every_module_is_on_the_layout_page():
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    modules = sorted((ROOT / "meshwise").rglob("*.py"))
    named = {m.relative_to(ROOT / "meshwise").as_posix() for m in modules}
    listed = set(re.findall(r"^\| `((?:\w+/)*\w+\.py)`", text, re.M))
    missing = {n for n in named if not n.endswith("__init__.py")} - listed
    assert not missing, f"not on the layout page: {sorted(missing)}"
    assert not listed - named, f"on the layout page, but not in meshwise: {sorted(listed - named)}"


def test_planted_wrong_output_is_found():
    (block,) = blocks("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    assert run(block, "planted", {}) != block.output


def test_planted_pictures_are_not_outputs():
    page = "```python\nx = 1\n```\n\nA picture:\n\n```text\nx -> y\n```\n"
    assert [b.output for b in blocks(page)] == [None]
