"""What a long search is at, on the terminal."""

from typing import Any


class Progress:
    """What goes on, in one line of the terminal, and notes; nothing where it is not to be shown."""

    def __init__(self, is_shown: bool):
        """Show nothing yet."""
        self._console: Any = None
        self._status: Any = None
        self._counted = 0
        if is_shown:
            from rich.console import Console

            self._console = Console(stderr=True)
            self._status = self._console.status("searching")

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

    def note(self, text: str) -> None:
        """Say something that stays, with the count."""
        if self._console is not None:
            self._console.print(f"{self._counted}: {text}", highlight=False)
