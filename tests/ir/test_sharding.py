"""Shardings as data."""

import pickle

from meshwise.ir.sharding import Reduction, sharding_of, unreduced


def test_a_sharding_that_comes_from_another_process_is_found_in_sets():
    here = unreduced((("x",), ()), ("y",), Reduction.SUM)
    there = unreduced((("x",), ("z",)), ("y",), Reduction.SUM)
    object.__setattr__(there, "_hash", 1)  # as texts hash there
    found = pickle.loads(pickle.dumps([here, there, sharding_of(((),))]))
    assert found == [here, there, sharding_of(((),))]
    assert found[0] in {here}
    assert hash(found[1]) != 1
