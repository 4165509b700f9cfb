"""Mutants of rules by which elements are found, written, ordered or drawn."""

from tests.mutants.mutant import Mutant, alone, truth

INDEXING = (
    Mutant(
        "indexing",
        "positions outside are not filled",
        "meshwise/rules/indexing.py",
        "    return [where(vectors.in_range(), taken, filled)]",
        "    return [taken]",
        alone("gather"),
    ),
    Mutant(
        "indexing",
        "what is picked is scaled by anything",
        "meshwise/rules/picked.py",
        "    if not all(_is_plain(a) for i, a in enumerate(eqn.invars) if i not in operands):",
        "    if False:",
        ("tests/run/test_picked.py",),
    ),
    Mutant(
        "indexing",
        "every device fills, not one",
        "meshwise/rules/indexing.py",
        'lax.broadcast(first, taken.shape), lax.full_like(taken, params["fill_value"]), nothing',
        'lax.full(taken.shape, True), lax.full_like(taken, params["fill_value"]), nothing',
        truth("claimed and fill"),
    ),
    Mutant(
        "indexing",
        "a device owns a position too many",
        "meshwise/rules/positions.py",
        "    end = context.local_size(factor) - rows\n",
        "    end = context.local_size(factor) - rows + 1\n",
        alone("window_at"),
    ),
    Mutant(
        "indexing",
        "starts past the end are not clamped",
        "meshwise/rules/positions.py",
        "found.append(zero if n == window else clamp_position(start, n - window))",
        "found.append(zero if n == window else clamp_position(start, n))",
        alone("window_at"),
    ),
)
UPDATING = (
    Mutant(
        "updating",
        "rows that others write are cut from beyond the end",
        "meshwise/rules/dynamic_update.py",
        "local_start(context, factor, starts[d], update.shape[d])",
        "local_start(context, factor, starts[d])",
        ("tests/fuzz/test_found.py::test_few_rows_at_a_known_place_of_what_a_reshard_sliced",),
    ),
    Mutant(
        "updating",
        "windows that come first overlap in another order",
        "meshwise/rules/scattering.py",
        "    if vectors.is_out_of_order:",
        "    if vectors.is_out_of_order and not vectors.spread:",
        ("tests/rules/test_edges_of_types.py::test_the_last_of_overlapping_windows_wins",),
    ),
    Mutant(
        "updating",
        "what was there counts on every device",
        "meshwise/rules/scattering.py",
        "    return lax.select(first, operand, nothing)\n",
        "    return operand\n",
        alone("scatter"),
    ),
    Mutant(
        "updating",
        "windows that leave the operand are written",
        "meshwise/rules/scattering.py",
        "            here = here if kept is None else lax.bitwise_and(here, kept)\n",
        "",
        alone("scatter", "by_row"),
    ),
    Mutant(
        "updating",
        "a window is written a row further on",
        "meshwise/rules/dynamic_update.py",
        "begin = lax.sub(start.dtype.type(local), start)",
        "begin = lax.sub(start.dtype.type(local - 1), start)",
        alone("window_at"),
    ),
    Mutant(
        "updating",
        "an overwriting scatter carries sums although positions meet",
        "meshwise/rules/scattering.py",
        'return ((0, 2),) if params["unique_indices"] or vectors <= 1 else ()',
        "return ((0, 2),)",
        truth("sums_pass_only and scatter"),
    ),
)
ORDERING = (
    Mutant(
        "ordering",
        "a running sum leaves out its own shard's carry",
        "meshwise/rules/prefix.py",
        "return lax.gt(index, np.int32(0))",
        "return lax.gt(index, np.int32(1))",
        alone("running"),
    ),
    Mutant(
        "ordering",
        "a running sum from behind sees padding",
        "meshwise/rules/prefix.py",
        "mask_padding(context, operand, axis, factor, _identity(context, operand.dtype))",
        "lax.add(operand, _identity(context, operand.dtype))",
        alone("running"),
    ),
    Mutant(
        "ordering",
        "padding is among the largest",
        "meshwise/rules/largest.py",
        "return np.full(np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)[0]",
        "return np.array(np.inf, dtype)",
        truth("claimed and top_k"),
    ),
    Mutant(
        "ordering",
        "the largest are counted from the shard's first row",
        "meshwise/rules/largest.py",
        "    indices = lax.add(indices, lax.full_like(indices, context.offset(factor)))\n",
        "",
        alone("ordered"),
    ),
    Mutant(
        "ordering",
        "both devices of a pair keep the smaller half",
        "meshwise/rules/network.py",
        "table[first], table[second] = 1, 2",
        "table[first], table[second] = 1, 1",
        ("tests/rules/test_sorting.py",),
    ),
)
RANDOM = (
    Mutant(
        "random",
        "every device draws the first one's bits",
        "meshwise/rules/random.py",
        "offsets.append(lax.mul(index, np.uint32(sizes[-1])) if axes else None)",
        "offsets.append(None)",
        alone("random_numbers"),
    ),
    Mutant(
        "random",
        "rows are as long as the device's own",
        "meshwise/rules/random.py",
        "stride = math.prod(shape[d + 1 :])",
        "stride = math.prod(sizes[d + 1 :])",
        alone("random_numbers"),
    ),
)
LINALG = (
    Mutant(
        "linalg",
        "the matrix of a decomposition may be split",
        "meshwise/rules/linalg.py",
        'return [shared + factoring.dims(shape[batch:], "whole") for shape in tensors]',
        "return [shared + factoring.dims(shape[batch:]) for shape in tensors]",
        alone("linear_algebra"),
    ),
    Mutant(
        "linalg",
        "the wrong dim of a solve is free",
        "meshwise/rules/linalg.py",
        'free = -1 if application.params["left_side"] else -2',
        'free = -2 if application.params["left_side"] else -1',
        alone("linear_algebra"),
    ),
)
PLACES = (*INDEXING, *UPDATING, *ORDERING, *RANDOM, *LINALG)
