"""An error of exactly one class with exactly one text, and the lines of a test that it names."""

import pytest

import meshwise as mw


def check(error, text, call, also=None):
    """The call raises exactly this class with exactly this text, and nothing of JAX's.

    `also` is the class of what JAX raises for the same mistake, where the error is of both.
    """
    with pytest.raises(mw.MeshwiseError) as caught:
        call()
    assert str(caught.value) == text
    found = type(caught.value)
    assert found is error if also is None else issubclass(found, error) and issubclass(found, also)
    assert found.__name__ == error.__name__
    assert "jax/_src" not in text


def lines_of(path):
    """A function from a marker to `file:line` of the one line of a file that ends in it."""

    def line_of(marker):
        with open(path, encoding="utf-8") as file:
            lines = [i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {marker}")]
        assert len(lines) == 1
        return f"{path}:{lines[0]}"

    return line_of
