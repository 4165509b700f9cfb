"""The search for cycles of garbage goes on after the last of several plans, in whatever thread."""

import gc

from meshwise.run.garbage import garbage_later


def test_it_goes_on_after_the_last_plan():
    first, second = garbage_later(), garbage_later()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_stays_off_where_it_was():
    gc.disable()
    try:
        with garbage_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
