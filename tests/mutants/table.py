"""The table: at least one mutant a family."""

from tests.mutants.mutant import Mutant, alone, truth
from tests.mutants.table_pipelines import PIPELINES
from tests.mutants.table_places import PLACES
from tests.mutants.table_planning import PLANNING

ELEMENTWISE = (
    Mutant(
        "elementwise",
        "a sum passes through a product of both factors",
        "meshwise/rules/elementwise.py",
        "((0,), (1,)) if keeps_sums(application) else ())",
        "((0,), (1,), (0, 1)) if keeps_sums(application) else ())",
        truth("sums_pass_only and mul"),
    ),
    Mutant(
        "elementwise",
        "an addition carries one of its terms",
        "meshwise/rules/elementwise.py",
        '@register("add", "add_any", "sub", "complex")\n'
        "def _add_rule(application: Application) -> OpRule:\n"
        "    return _elementwise(application, ((0, 1),))",
        '@register("add", "add_any", "sub", "complex")\n'
        "def _add_rule(application: Application) -> OpRule:\n"
        "    return _elementwise(application, ((0,),))",
        truth("sums_pass_only and sub"),
    ),
    Mutant(
        "elementwise",
        "a cast that rounds is done before the sum",
        "meshwise/rules/elementwise.py",
        "return new.nmant >= old.nmant and new.maxexp",
        "return new.maxexp",
        truth("sums_pass_only and convert"),
    ),
)
CONTRACTION = (
    Mutant(
        "contraction",
        "the rows of a result are those of the right operand",
        "meshwise/rules/contraction.py",
        "    result += [dim for d, dim in enumerate(rhs) if d not in paired]\n",
        "    free = [dim for d, dim in enumerate(rhs) if d not in paired]\n"
        "    result = result[: len(batch_l)] + free + result[len(batch_l) :]\n",
        alone("product"),
    ),
    Mutant(
        "contraction",
        "products of booleans are summed",
        "meshwise/rules/contraction.py",
        "return Reduction.OR if dtype == np.bool_ else Reduction.SUM",
        "return Reduction.SUM",
        alone("boolean_product"),
    ),
    Mutant(
        "contraction",
        "padding of a ragged product's left operand is seen",
        "meshwise/rules/contraction.py",
        "masked=(0, 1),",
        "masked=(),",
        truth("claimed and ragged"),
    ),
)
CONVOLUTION = (
    Mutant(
        "convolution",
        "the padding's sign is wrong",
        "meshwise/rules/convolution.py",
        'Window(stride, -params["padding"][d][0], extent',
        'Window(stride, params["padding"][d][0], extent',
        alone("convolution"),
    ),
    Mutant(
        "convolution",
        "a dilated kernel is a row too short",
        "meshwise/rules/convolution.py",
        "extent = (kernel - 1) * dilation + 1",
        "extent = (kernel - 1) * dilation",
        alone("convolution"),
    ),
    Mutant(
        "convolution",
        "groups are counted as on one device",
        "meshwise/rules/convolution.py",
        "changed[name] = context.local_size(group)",
        "changed[name] = params[name]",
        truth("claimed and groups"),
    ),
    Mutant(
        "convolution",
        "the padding of a kernel that is split is seen",
        "meshwise/rules/convolution.py",
        "            rhs = mask_padding(context, rhs, rhs_spec[d + 2], factor, "
        "np.zeros((), rhs.dtype))\n",
        "            pass\n",
        truth("claimed and conv and kernel"),
    ),
)
REDUCTION = (
    Mutant(
        "reduction",
        "a product begins with zero",
        "meshwise/rules/identity.py",
        "return np.ones((), dtype)[()]",
        "return np.zeros((), dtype)[()]",
        alone("product_reduction", "exact_reduction"),
    ),
    Mutant(
        "reduction",
        "a maximum ignores what is above all numbers",
        "meshwise/rules/identity.py",
        "_lowest(dtype) if reduction is Reduction.MAX else",
        "_highest(dtype) if reduction is Reduction.MAX else",
        alone("reduction", "exact_reduction"),
    ),
    Mutant(
        "reduction",
        "the position is counted from the shard's own first row",
        "meshwise/rules/reduction.py",
        "index = lax.add(place, lax.convert_element_type(context.offset(factor), place.dtype))",
        "index = place",
        alone("ordered", "exact_reduction"),
    ),
    Mutant(
        "reduction",
        "a maximum carries sums",
        "meshwise/rules/reduction.py",
        'linear=((0,),) if name == "reduce_sum" else (),',
        "linear=((0,),),",
        truth("sums_pass_only and reduce_max"),
    ),
)
WINDOWS = (
    Mutant(
        "windows",
        "a halo is a row too short",
        "meshwise/rules/window.py",
        "length = max(0, *(end - start for start, end in zip(starts, ends, strict=True)))",
        "length = max(1, *(end - start for start, end in zip(starts, ends, strict=True))) - 1",
        alone("pool", "strided_slice"),
    ),
    Mutant(
        "windows",
        "rows before the operand are not filled",
        "meshwise/rules/window.py",
        "return self.fetch.starts[0] < 0 or self._end > self.size",
        "return self._end > self.size",
        alone("pool", "pad"),
    ),
    Mutant(
        "windows",
        "shards begin a stride too late",
        "meshwise/rules/window.py",
        "starts = tuple(-(-first // dilation) for first in self.firsts)",
        "starts = tuple(-(-first // dilation) + (first > 0) for first in self.firsts)",
        alone("pool", "strided_slice"),
    ),
    Mutant(
        "windows",
        "all shards have as many fillers in front as the first",
        "meshwise/rules/window.py",
        "start = shard_entry([max(leads) - lead for lead in leads], reading.axes, mesh)",
        "start = shard_entry([max(leads) - leads[0] for _ in leads], reading.axes, mesh)",
        alone("pad", "convolution"),
    ),
    Mutant(
        "windows",
        "the last window over a shard is forgotten",
        "meshwise/rules/pooling.py",
        "for a, b in zip(firsts, lasts, strict=True)) + 1",
        "for a, b in zip(firsts, lasts, strict=True))",
        alone("pool"),
    ),
    Mutant(
        "windows",
        "padding wins where the largest is selected",
        "meshwise/rules/pooling.py",
        "return reduction_identity(Reduction.MAX if largest else Reduction.MIN, dtype)",
        "return reduction_identity(Reduction.MIN if largest else Reduction.MAX, dtype)",
        alone("pool"),
    ),
    Mutant(
        "halo",
        "rows go to the wrong neighbour",
        "meshwise/rules/halo.py",
        "pairs = [(number[o.sender], number[o.receiver]) for o in piece.overlaps]",
        "pairs = [(number[o.receiver], number[o.sender]) for o in piece.overlaps]",
        alone("strided_slice", "moving_mean"),
    ),
    Mutant(
        "halo",
        "rows after the dim are not filled",
        "meshwise/rules/halo.py",
        "inside = lax.bitwise_and(lax.gt(row, after), lax.lt(row, before))",
        "inside = lax.gt(row, after)",
        alone("pool", "pad"),
    ),
)
SHAPE = (
    Mutant(
        "shape",
        "a device counts from zero",
        "meshwise/rules/shape.py",
        "context.offset(dim[0], counted)",
        "counted.type(0)",
        alone("made_of_nothing"),
    ),
    Mutant(
        "shape",
        "a transpose goes the other way",
        "meshwise/rules/shape.py",
        'permuted = [dims[d] for d in application.params["permutation"]]',
        'permuted = [dims[application.params["permutation"].index(d)] for d in range(len(dims))]',
        alone("transpose"),
    ),
    Mutant(
        "shape",
        "rows of a reshape begin a row late",
        "meshwise/rules/reshaping.py",
        "starts = tuple(shard * wanted for shard in range(shards))",
        "starts = tuple(shard * wanted + (shard > 0) for shard in range(shards))",
        alone("reshape", "heads"),
    ),
    Mutant(
        "shape",
        "a reversal keeps its padding in front",
        "meshwise/rules/slicing.py",
        "starts = tuple(size - (shard + 1) * block for shard in range(shards))",
        "starts = tuple((shards - shard - 1) * block for shard in range(shards))",
        alone("slices", "strided_slice"),
    ),
    Mutant(
        "shape",
        "the second array joined begins a row early",
        "meshwise/rules/slicing.py",
        "from_here = lax.ge(row, lax.full_like(row, -window.first))",
        "from_here = lax.ge(row, lax.full_like(row, -window.first - 1))",
        alone("joins", "moving_mean"),
    ),
    Mutant(
        "padding",
        "a pad's low side has the wrong sign",
        "meshwise/rules/slicing.py",
        "return Window(first=-low, dilation=interior + 1)",
        "return Window(first=low, dilation=interior + 1)",
        alone("pad"),
    ),
    Mutant(
        "padding",
        "padding is filled from a row too late",
        "meshwise/rules/identity.py",
        "inside = lax.lt(position, lax.full_like(position, rows))",
        "inside = lax.le(position, lax.full_like(position, rows))",
        alone("reduction"),
    ),
    Mutant(
        "padding",
        "nothing is masked",
        "meshwise/partition/padding.py",
        "masked[position] = mask_padding(context, array, dim, factors[0], identity)",
        "masked[position] = array",
        alone("reduction"),
    ),
)
MUTANTS = (
    *ELEMENTWISE, *CONTRACTION, *CONVOLUTION, *REDUCTION, *WINDOWS, *SHAPE, *PLACES, *PLANNING,
    *PIPELINES,
)  # fmt: skip
