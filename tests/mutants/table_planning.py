"""Mutants of the steps beside the rules: reshards, completion, choice, partition, running."""

from tests.mutants.mutant import Mutant

PROGRAMS = (
    "tests/fuzz/test_found.py",
    "tests/fuzz/test_fuzz.py",
    "tests/choose",
    "tests/partition",
)
CONTROL = ("tests/end_to_end/test_sent_control.py",)
RESHARD = (
    Mutant(
        "reshard",
        "a slice is taken from the other end",
        "meshwise/reshard/emit.py",
        "starts[dim] = lax.axis_index(part.axes) * np.int32(sizes[dim])",
        "starts[dim] = x.shape[dim] - (lax.axis_index(part.axes) + 1) * sizes[dim]",
        ("tests/reshard/test_values.py",),
    ),
    Mutant(
        "reshard",
        "an all_to_all goes backwards",
        "meshwise/reshard/emit.py",
        "return lax.all_to_all(x, part.axes, gaining, losing, tiled=True)",
        "return lax.all_to_all(x, part.axes[::-1], gaining, losing, tiled=True)",
        ("tests/reshard/test_values.py",),
    ),
    Mutant(
        "reshard",
        "a maximum over devices loses NaN",
        "meshwise/rules/ordered.py",
        "return lax.select(lax.ne(x, x), lax.full_like(found, beyond), found)",
        "return found",
        ("tests/fuzz/test_found.py", "tests/reshard/test_unreduced.py"),
    ),
    Mutant(
        "reshard",
        "axes of a piece are in the mesh's order",
        "meshwise/reshard/emit.py",
        "            parts.sort(key=lambda i: axes.index(step.parts[i].axes[0]))\n",
        "            parts.sort(key=lambda i: -axes.index(step.parts[i].axes[0]))\n",
        ("tests/reshard/test_values.py",),
    ),
    Mutant(
        "reshard",
        "an AND of booleans is an OR",
        "meshwise/reshard/emit.py",
        "is_least = reduction in (Reduction.MIN, Reduction.AND)",
        "is_least = reduction is Reduction.MIN",
        ("tests/fuzz/test_found.py",),
    ),
    Mutant(
        "reshard",
        "the padding of a gathered dim stays",
        "meshwise/reshard/emit.py",
        "return x if x.shape == sizes else lax.slice(x, [0] * x.ndim, sizes)",
        "return x",
        ("tests/reshard/test_values.py",),
    ),
)
PROPAGATE = (
    Mutant(
        "propagate",
        "an axis is given to two dims",
        "meshwise/propagate/propagate.py",
        "        if axis in used and axis not in current:\n",
        "        if False:\n",
        ("tests/propagate", "tests/fuzz/test_found.py"),
    ),
    Mutant(
        "propagate",
        "an axis is given to two factors of a dim",
        "meshwise/propagate/propagate.py",
        "_fitting(rule, factor, _unused(own, (), set(axes)), mesh)",
        "_fitting(rule, factor, own, mesh)",
        ("tests/fuzz/test_found.py", "-k", "two_factors"),
    ),
    Mutant(
        "propagate",
        "the weakest claim wins",
        "meshwise/propagate/conflicts.py",
        "ordered = sorted(claims, key=lambda c: c.strength, reverse=True)",
        "ordered = sorted(claims, key=lambda c: c.strength)",
        ("tests/fuzz/test_ladder.py",),
    ),
    Mutant(
        "propagate",
        "hints inside are changed",
        "meshwise/propagate/propagate.py",
        "        state.seed(program.equations[index].outvars[0], hint, pin=True)",
        "        state.seed(program.equations[index].outvars[0], hint, pin=False)",
        ("tests/propagate", "tests/fuzz/test_fuzz.py"),
    ),
    Mutant(
        "propagate",
        "a NaN is found by its place only",
        "meshwise/rules/reduction.py",
        "lax.select(lax.ne(first, first), first, extreme)",
        "extreme",
        ("tests/propagate/test_extremes.py",),
    ),
    Mutant(
        "propagate",
        "bits are extremes",
        "meshwise/propagate/extremes.py",
        "return not bitwise and bool(",
        "return bool(",
        ("tests/propagate/test_extremes.py",),
    ),
)
CHOOSE = (
    Mutant(
        "choose",
        "a sum is carried to several users",
        "meshwise/choose/carries.py",
        "return only or atom in self.gathered",
        "return True",
        PROGRAMS,
    ),
    Mutant(
        "choose",
        "a sum is not carried into several branches",
        "meshwise/choose/carries.py",
        "if len(places) == 1 or apart:",
        "if len(places) == 1:",
        CONTROL,
    ),
    Mutant(
        "choose",
        "a sum is carried where only one term is",
        "meshwise/choose/search.py",
        "common = own if common is None else common & own",
        "common = own if common is None else common | own",
        PROGRAMS,
    ),
    Mutant(
        "choose",
        "a strategy that no local rule can follow is free",
        "meshwise/choose/limits.py",
        "    followed = [a for a in natural if node_seconds(graph, node, a) < IMPOSSIBLE]\n",
        "    followed = natural\n",
        PROGRAMS,
    ),
)
PARTITION = (
    Mutant(
        "partition",
        "values that are reduced together are cut apart wrongly",
        "meshwise/partition/walk.py",
        "        start += array.size\n",
        "        start += 1\n",
        PROGRAMS,
    ),
    Mutant(
        "partition",
        "what a sum in a loop starts from is every device's term",
        "meshwise/reshard/emit.py",
        "    return jnp.where(is_first, x, jnp.zeros_like(x))",
        "    return jnp.asarray(x)",
        CONTROL,
    ),
    Mutant(
        "partition",
        "constants of a branch are made in another",
        "meshwise/propagate/constants.py",
        "places.get((index, k), index)",
        "index",
        CONTROL,
    ),
    Mutant(
        "partition",
        "parts of an axis take each other's sizes",
        "meshwise/partition/coarsen.py",
        "sizes += [mesh.size(run) for run in own]",
        "sizes += [mesh.size(run) for run in own[::-1]]",
        ("tests/fuzz/test_found.py",),
    ),
    Mutant(
        "partition",
        "an operator's operands are taken as they lie",
        "meshwise/partition/walk.py",
        "itemsize_of(var), mesh, source, target, walk.hardware)\n    steps",
        "itemsize_of(var), mesh, source, source, walk.hardware)\n    steps",
        ("tests/partition",),
    ),
    Mutant(
        "mesh",
        "permuted devices are numbered in the tuple's order",
        "meshwise/ir/mesh.py",
        "return tuple(numbers.transpose([ordered.index(a) for a in axes]).ravel().tolist())",
        "return tuple(numbers.ravel().tolist())",
        (
            "tests/reshard/test_values.py",
            "tests/rules/test_exchanges.py",
            "tests/fuzz/test_fuzz.py",
            "tests/fuzz/test_found.py",
        ),
    ),
)
RUN = (
    Mutant(
        "run",
        "the padding of an uneven result is shown",
        "meshwise/run/simulate.py",
        "    return _Copies(whole[(slice(None), *(slice(n) for n in output.shape))], copy_axes)",
        "    return _Copies(whole, copy_axes)",
        ("tests/run/test_simulate_differing.py",),
    ),
    Mutant(
        "run",
        "copies that differ are not noticed",
        "meshwise/run/simulate.py",
        "    if not unequal.any():\n        return []\n",
        "    return []\n",
        ("tests/run/test_simulate_differing.py",),
    ),
)
PLANNING = (*RESHARD, *PROPAGATE, *CHOOSE, *PARTITION, *RUN)
