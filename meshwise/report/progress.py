"""What a long search is at, on the terminal."""

from typing import Any


class Progress:
    """One line of the terminal that says what goes on; nothing where it is not to be shown."""

    def __init__(self, is_shown: bool):
        """Show nothing yet."""
        self._status: Any = None
        self._counted = 0
        if is_shown:
            from rich.console import Console

            self._status = Console(stderr=True).status("searching")

    def __enter__(self) -> "Progress":
        """Begin."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End, whatever happened."""
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Say what goes on now."""
        if self._status is not None:
            self._status.update(text)

    def count(self, what: str) -> None:
        """Say how many times this was said."""
        self._counted += 1
        self.show(f"{self._counted} {what}")
