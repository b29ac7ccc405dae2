"""Cuts text at stop strings while it streams. Plain Python, no jax."""

from collections.abc import Iterable


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may become one.

    The cut is where the earliest match begins, whatever pieces the text came in: a stop string that
    is complete waits for one that began before it and is not complete yet. Of two that begin at the
    same place the shorter is named as `match`; the cut is the same.

        stops = StopStrings(["</s>"])
        assert stops.push("All done.<") == "All done."  # "<" may be the beginning
        assert stops.push("/s>never seen") == ""
        assert stops.match == "</s>"

    Attributes:
        match: The stop string that ended the text, or None.

    Raises:
        ValueError: A stop string is empty.
    """

    def __init__(self, stops: Iterable[str]):
        self.match: str | None = None
        self._stops = sorted(stops, key=len)
        self._held = ""
        if "" in self._stops:
            raise ValueError(
                "a stop string is empty and would end every text at once: leave it out"
            )

    def push(self, text: str) -> str:
        """Takes the next piece of text and returns what can be shown of all so far."""
        if self.match is not None:
            return ""
        self._held += text
        return self._release(is_last=False)

    def finish(self) -> str:
        """Returns what was held back, now that no more text comes (up to a stop string in it)."""
        return self._release(is_last=True)

    def _release(self, *, is_last: bool) -> str:
        held = self._held
        for start in range(len(held)):
            self.match = next((stop for stop in self._stops if held.startswith(stop, start)), None)
            if self.match is not None:
                self._held = ""
                return held[:start]
            if not is_last and any(stop.startswith(held[start:]) for stop in self._stops):
                self._held = held[start:]
                return held[:start]
        self._held = ""
        return held
