"""Loops and branches, with bodies made of operators and of loops and branches in turn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.fuzz.making import FLOATS, INTEGERS, MOST_ELEMENTS, Maker, Operators, Value, fill
from tests.fuzz.programs import Body, Input, Step, size_of

DEEPEST = 3
LENGTHS = (0, 1, 2, 3, 3, 4, 5)
MOST_STEPS = 8  # of a scan over a dim that is there
LARGEST_CARRIED = 4.0
INSIDE = (1, 2, 3, 4, 6)  # about how many operators a body has


@dataclass(frozen=True)
class Carried:
    """A value that goes round: its type, how it begins, and what its body calls it.

    start: text, where no operand is it; is_sum: steps only add to it.
    """

    inside: Value
    operand: Value | None
    start: str = ""
    is_sum: bool = False


def scan(maker: Maker) -> None:
    """A scan: carried values, sums, rows of stacks that are there, rows that are stacked."""
    maker = _deeper(maker)
    length, stacks = _stacks(maker)
    carried = _carried(maker, length)
    rows = [_parameter(maker, replace(x, shape=x.shape[1:])) for x in stacks]
    inner = maker.inside([c.inside for c in carried if not c.is_sum] + rows)
    _fill(inner)
    new = [_next(inner, c) for c in carried]
    made = [v for v in inner.values if v.name not in {x.name for x in maker.values}]
    kept = [v for v in made if size_of(v.shape) * length <= MOST_ELEMENTS // 2]
    count = inner.draw.choice((0, 1, 1, 2)) if kept and (length or maker.may_be_empty) else 0
    stacked = [inner.draw.choice(kept) for _ in range(count)]
    text = f"(({_places(new)}), ({_places(stacked, len(new))}))"
    body = _body(maker, inner, [*(c.inside for c in carried), *rows], text, [*new, *stacked])
    starts, operands = _starts(carried)
    xs = _places(stacks, len(operands))
    options = f"length={length}" + maker.draw.choice(("", "", ", reverse=True", ", unroll=2"))
    function = f"jax.checkpoint({body.name})" if maker.chance(0.2) else body.name
    loop = f"lax.scan(lambda c, x: {function}(*c, *x), ({starts}), ({xs}), {options})"
    whole = _add(maker, loop, [*operands, *stacks], [body])
    for k, c in enumerate(carried):
        _take(maker, whole, f"{{0}}[0][{k}]", c.inside)
    for k, v in enumerate(stacked):
        _take(maker, whole, f"{{0}}[1][{k}]", replace(v, shape=(length, *v.shape)))


def fori(maker: Maker) -> None:
    """A loop that counts, to a number that is known."""
    count = maker.draw.choice(LENGTHS)
    _count_to(maker, str(count), count, [])


def fori_to_data(maker: Maker) -> None:
    """A loop that counts to a number that is data: no gradient goes through it."""
    value = maker.pick(("int32",), lambda v: size_of(v.shape) > 0)
    _count_to(maker, "jnp.max({OPERAND}) % 4" if value.shape else "{OPERAND} % 4", 4, [value])


def _count_to(maker: Maker, bound: str, most: int, bounds: Sequence[Value]) -> None:
    maker = _deeper(maker)
    carried = _carried(maker, most)
    index = _parameter(maker, Value("", (), "int32", most))
    inner = maker.inside([index, *(c.inside for c in carried if not c.is_sum)])
    _fill(inner)
    new = [_next(inner, c) for c in carried]
    body = _body(maker, inner, [index, *(c.inside for c in carried)], f"({_places(new)})", new)
    starts, operands = _starts(carried)
    bound = bound.replace("{OPERAND}", f"{{{len(operands)}}}")
    text = f"lax.fori_loop(0, {bound}, lambda i, c: {body.name}(i, *c), ({starts}))"
    whole = _add(maker, text, [*operands, *bounds], [body])
    for k, c in enumerate(carried):
        _take(maker, whole, f"{{0}}[{k}]", c.inside)


def while_loop(maker: Maker) -> None:
    """A loop that ends when its data says so, or after a few trips."""
    maker = _deeper(maker)
    most = maker.draw.choice(LENGTHS)
    carried = _carried(maker, most)
    index = _parameter(maker, Value("", (), "int32", most))
    own = [index, *(c.inside for c in carried)]
    seen = [index, *(c.inside for c in carried if not c.is_sum)]
    tested = maker.inside(seen)
    if maker.chance(0.5):
        _fill(tested)
    number = tested.pick(FLOATS)
    limit = maker.draw.choice((0.1, 0.7, 2.0, -1.0))
    reduce = maker.draw.choice(("sum", "mean", "max"))
    reduce = reduce if size_of(number.shape) else "sum"
    test = f"({{0}} < {most}) & (jnp.{reduce}({{1}}) < {limit})"
    goes_on = _body(maker, tested, own, test, [index, number])
    own = [replace(v, name=maker.new_name("c")) for v in own]
    index, carried = own[0], [replace(c, inside=v) for c, v in zip(carried, own[1:], strict=True)]
    inner = maker.inside([index, *(c.inside for c in carried if not c.is_sum)])
    _fill(inner)
    new = [_next(inner, c) for c in carried]
    body = _body(maker, inner, own, f"({{0}} + 1, {_places(new, 1)})", [index, *new])
    starts, operands = _starts(carried)
    text = f"lax.while_loop(lambda c: {goes_on.name}(*c), lambda c: {body.name}(*c), (0, {starts}))"
    whole = _add(maker, text, operands, [goes_on, body])
    for k, c in enumerate(carried):
        _take(maker, whole, f"{{0}}[{k + 1}]", c.inside)


def branches(maker: Maker) -> None:
    """A choice between two or three, by a number that is data."""
    maker = _deeper(maker)
    wanted = [_any(maker) for _ in range(maker.draw.choice((1, 1, 2)))]
    count = maker.draw.choice((2, 2, 3))
    bodies = []
    for _ in range(count):
        inner = maker.inside([])
        _fill(inner)
        found = [_result(inner, v) for v in wanted]
        bodies.append(_body(maker, inner, [], f"({_places(found)})", found))
    number = maker.pick((*FLOATS, "int32", "bool"), lambda v: size_of(v.shape) > 0)
    total = f"jnp.sum({{0}}{'' if number.dtype in FLOATS else '.astype(int)'})"
    names = ", ".join(b.name for b in bodies)
    if count == 2:
        text = f"lax.cond({total} > {maker.draw.choice((0, 1))}, {names})"
    else:
        text = f"lax.switch(jnp.int32({total} * 1.3), ({names}))"
    whole = _add(maker, text, [number], bodies)
    for k, v in enumerate(wanted):
        _take(maker, whole, f"{{0}}[{k}]", replace(v, bound=max(v.bound, LARGEST_CARRIED)))


def mapped(maker: Maker) -> None:
    """The same for each row: one after the other, or all at once."""
    maker = _deeper(maker)
    length, stacks = _stacks(maker)
    if not stacks:
        raise LookupError("nothing to map over")
    rows = [_parameter(maker, replace(x, shape=x.shape[1:])) for x in stacks]
    inner = maker.inside(rows)
    _fill(inner)
    own = {x.name for x in (*maker.values, *inner.inputs)}
    made = [v for v in inner.values if v.name not in own]
    kept = [v for v in made if size_of(v.shape) * length <= MOST_ELEMENTS // 2]
    if not kept:
        raise LookupError("nothing of a good size")
    result = inner.draw.choice(kept[-3:])
    body = _body(maker, inner, rows, "{0}", [result])
    operands = ", ".join(f"{{{k}}}" for k in range(len(stacks)))
    batches = "ragged_dot" not in repr(body)  # JAX batches these along the first dim alone
    if maker.chance(0.5) or not batches:
        text = f"(lax.map(lambda x: {body.name}(*x), ({operands},)),)"
    else:
        text = f"(jax.vmap({body.name})({operands}),)"
    whole = _add(maker, text, stacks, [body])
    _take(maker, whole, "{0}[0]", replace(result, shape=(length, *result.shape)))


def at_a_step(maker: Maker) -> None:
    """A row at a number, as of a step, that is data: read or written."""
    value = maker.pick(FLOATS, lambda v: 0 not in v.shape, least=1)
    numbers = [v for v in maker.values if (v.shape, v.dtype) == ((), "int32")]
    number = maker.draw.choice(numbers) if numbers else maker.fresh((), "int32")
    dim = maker.draw.randrange(value.rank)
    at = f"{{1}} % {value.shape[dim]}"
    row = f"lax.dynamic_index_in_dim({{0}}, {at}, {dim}, {maker.chance(0.5)})"
    kept = f"lax.dynamic_index_in_dim({{0}}, {at}, {dim}, True)"
    text = maker.draw.choice(
        (
            row,
            row,
            f"lax.dynamic_update_slice_in_dim({{0}}, jnp.tanh({kept}), 0, {dim})",
            f"lax.dynamic_update_slice_in_dim({{0}}, jnp.sin({kept}), ({at}) // 2, {dim})",
            f"jnp.moveaxis({{0}}, {dim}, 0).at[{at}].add(0.25)",
            f"jnp.where(jnp.arange({value.shape[dim]}) == {at}, jnp.moveaxis({{0}}, {dim}, -1), 0)",
        )
    )
    maker.add(text, value, number, bound=value.bound + 1)


def _deeper(maker: Maker) -> Maker:
    """The maker, where another loop or branch may stand in it."""
    if maker.depth >= DEEPEST:
        raise LookupError("deep enough")
    return maker


def _fill(inner: Maker) -> None:
    """A few operators in a body."""
    fill(inner, inner.inner_operators, inner.draw.choice(INSIDE), inner.draw)


def _parameter(maker: Maker, value: Value) -> Value:
    return replace(value, name=maker.new_name("c"))


def _any(maker: Maker) -> Value:
    """A value whose type something may have: mostly floats."""
    if maker.chance(0.15):
        return maker.pick((str(maker.some(*INTEGERS)), "bool"))
    if maker.chance(0.06):
        return maker.fresh((), "key")
    return maker.pick(FLOATS)


def _stacks(maker: Maker) -> tuple[int, list[Value]]:
    """What a loop goes through step by step, and how many steps that are."""
    if maker.chance(0.25):
        return maker.draw.choice(LENGTHS), []
    first = maker.pick(
        (*FLOATS, "int32"), lambda v: v.shape[0] <= MOST_STEPS or maker.chance(0.05), least=1
    )
    found = [first]
    n = first.shape[0]
    if maker.chance(0.5):
        shape = maker.shape(0, 2)
        if first.rank > 1 and maker.chance(0.6):  # weights
            shape = (first.shape[-1], first.shape[-1])
        if n * size_of(shape) <= MOST_ELEMENTS:
            found.append(maker.like((n, *shape)))
    return n, found


def _carried(maker: Maker, trips: int) -> list[Carried]:
    found = []
    for _ in range(maker.draw.choice((0, 1, 1, 2, 2, 3))):
        if maker.chance(0.3):
            found.append(_sum(maker, trips))
            continue
        value = _any(maker)
        if found and maker.chance(0.3):  # two of one type can change places
            value = maker.like(found[0].inside.shape, found[0].inside.dtype)
        start = ""
        if value.dtype in FLOATS and maker.chance(0.15):
            start = f"jnp.full({value.shape}, 0.5, '{value.dtype}')"
        bound = max(value.bound, LARGEST_CARRIED)
        inside = _parameter(maker, replace(value, bound=bound))
        found.append(Carried(inside, None if start else value, start))
    return found


def _sum(maker: Maker, trips: int) -> Carried:
    """What a sum over some dims of a value is added to."""
    value = maker.pick(("float32",))
    dims = maker.subset(value.rank)
    shape = tuple(n for d, n in enumerate(value.shape) if d not in dims)
    kind = maker.draw.randrange(4)
    operand, start = None, ""
    if kind == 0:
        start = f"jnp.zeros({shape})"
    elif kind == 1:
        start = f"jnp.full({shape}, 1.5)" if shape else "-0.5"
    else:
        operand = maker.like(shape)
    inside = _parameter(maker, Value("", shape, "float32", 2.0 + 3 * trips))
    return Carried(inside, operand, start, True)


def _starts(carried: Sequence[Carried]) -> tuple[str, list[Value]]:
    operands = [c.operand for c in carried if c.operand is not None]
    places = iter(range(len(operands)))
    texts = [c.start if c.operand is None else f"{{{next(places)}}}" for c in carried]
    return "".join(f"{t}, " for t in texts), operands


def _places(values: Sequence[Value], first: int = 0) -> str:
    """Operands in a tuple."""
    return "".join(f"{{{first + k}}}, " for k in range(len(values)))


def _next(inner: Maker, carried: Carried) -> Value:
    """What goes round next: of the same type, and not larger."""
    c = carried.inside
    if carried.is_sum:
        return _added(inner, c)
    return _result(inner, c, is_carried=True)


def _added(inner: Maker, total: Value) -> Value:
    """A sum with a term more: summed over dims, or a product."""
    term = None
    wider = [v for v in inner.values if v.dtype == "float32" and _is_part(total.shape, v.shape)]
    if wider:
        value = inner.draw.choice(wider[-4:])
        dims = _dims_left_out(total.shape, value.shape)
        term = inner.add(f"jnp.sum(jnp.tanh({{0}}), {dims})", value, bound=3.0)
    if term is None:
        number = inner.pick(("float32",))
        term = inner.add("jnp.sum(jnp.sin({0}))", number, bound=3.0)
    text = inner.draw.choice(("{0} + {1}",) * 5 + ("{1} + {0}", "{0} - {1}", "{0} * 0.5 + {1}"))
    if inner.chance(0.1):
        text = str(inner.some("jnp.maximum({0}, {1})", "{0} * 0.5 - {1} + {1} * 2", "{1} - {0}"))
    elif inner.chance(0.1):
        text = f"jnp.where(jnp.sum({{1}}) > 0, {text}, {{0}})"
    assert term is not None
    return _made(inner, text, total, term)


def _is_part(part: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    left = iter(shape)
    return all(n in left for n in part)


def _dims_left_out(part: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    dims, wanted = [], list(part)
    for d, n in enumerate(shape):
        if wanted and n == wanted[0]:
            wanted.pop(0)
        else:
            dims.append(d)
    return tuple(dims)


def _result(inner: Maker, like: Value, is_carried: bool = False) -> Value:
    """A value of a type, of what a body has made, or of what it can make of that."""
    kind = inner.draw.random()
    alike = [v for v in inner.values[-8:] if (v.shape, v.dtype) == (like.shape, like.dtype)]
    if kind < 0.12:  # as it came, or a constant
        if not is_carried and like.dtype in FLOATS and inner.chance(0.5):
            return _made(inner, f"jnp.full({like.shape}, 0.25, '{like.dtype}')")
        return like
    if like.dtype == "key":
        return _made(
            inner, str(inner.some("jax.random.split({0})[0]", "jax.random.fold_in({0}, 3)")), like
        )
    if like.dtype not in FLOATS:
        if alike:
            return inner.draw.choice(alike)
        return _made(inner, "~{0}" if like.dtype == "bool" else "{0} * 3 + 1", like)
    if alike and kind < 0.85:
        value = inner.draw.choice(alike[-3:])
        fits = value.bound <= max(like.bound, LARGEST_CARRIED)
        return value if fits and inner.chance(0.6) else _made(inner, "jnp.tanh({0})", value)
    late = [v for v in inner.values[-4:] if v.dtype in FLOATS]
    number = inner.draw.choice(late) if late else inner.pick(FLOATS)
    cast = "" if number.dtype == like.dtype else f".astype('{like.dtype}')"
    return _made(inner, f"{{0}} * 0.5 + jnp.mean(jnp.sin({{1}})){cast}", like, number)


def _made(inner: Maker, text: str, *operands: Value) -> Value:
    value = inner.add(text, *operands, bound=LARGEST_CARRIED)
    if value is None:
        raise LookupError(text)
    return value


def _body(
    maker: Maker, inner: Maker, parameters: Sequence[Value], text: str, returned: Sequence[Value]
) -> Body:
    given = tuple(Input(p.name, p.shape, p.dtype) for p in parameters)
    names = tuple(v.name for v in returned)
    return Body(maker.new_name("f"), given, tuple(inner.steps), text, names)


def _add(maker: Maker, text: str, operands: Sequence[Value], bodies: Sequence[Body]) -> Value:
    """A step that makes several values."""
    if not any(body.returned for body in bodies):
        raise LookupError("nothing comes of it")
    names = tuple(v.name for v in operands)
    step = Step(maker.new_name(), text, names, (), "tuple", None, tuple(bodies))
    maker.steps.append(step)
    return Value(step.name, (), "tuple")


def _take(maker: Maker, whole: Value, text: str, value: Value) -> None:
    """One of them."""
    step = Step(maker.new_name(), text, (whole.name,), value.shape, value.dtype)
    maker.steps.append(step)
    maker.values.append(replace(value, name=step.name))


LOOPS: Operators = ((6, scan), (2, fori), (4, branches), (3, mapped))
WHILES: Operators = ((3, while_loop), (2, fori_to_data))
