"""A line of the user's code, as reports and errors show it."""

from pathlib import Path, PurePath


def place(source: str) -> str:
    """A source line with a short path: from the working directory, else its last two parts.

    Of an installed package the path within the package's folder is shown. A library's line may
    follow the user's: `train.py:12 (flax/nnx/nn/linear.py:431)`.
    """
    own, parenthesis, inner = source.removesuffix(")").rpartition(" (")
    if parenthesis and source.endswith(")"):
        return f"{_short(own)} ({_short(inner)})"
    return _short(source)


def whose(source: str) -> tuple[str, int]:
    """The file and the number of the user's own line; no file, and 0, where that is not known."""
    own, parenthesis, _ = source.removesuffix(")").rpartition(" (")
    path, _, line = (own if parenthesis and source.endswith(")") else source).rpartition(":")
    return (path, int(line)) if path and line.isdigit() else ("", 0)


def _short(source: str) -> str:
    """One line with a short path; what is none as it is."""
    path, colon, line = source.rpartition(":")
    if not colon or not line.isdigit():
        return source
    parts = PurePath(path).parts
    if "site-packages" in parts:
        start = len(parts) - parts[::-1].index("site-packages")
        return f"{PurePath(*parts[start:]).as_posix()}:{line}"
    try:
        return f"{PurePath(path).relative_to(Path.cwd()).as_posix()}:{line}"
    except ValueError:
        return f"{PurePath(*parts[-2:]).as_posix() if len(parts) > 2 else path}:{line}"
