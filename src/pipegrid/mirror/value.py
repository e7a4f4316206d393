"""
What is nothing but what is in it, as a named tuple is.

Those of ``typing`` take three milliseconds to load, for which a mirror's first request would wait.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, TypeVar

    V = TypeVar("V", bound="Value")


class Value:
    """Equal to another of its kind with the same in it. ``__slots__`` names what ``__init__`` takes."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    def _all(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.__slots__])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        said = zip(self.__slots__, self._all(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={each!r}' for name, each in said)})"

    def but(self: V, **changed: Any) -> V:
        """Return the same, with some of it changed."""
        said = dict(zip(self.__slots__, self._all(), strict=True))
        return type(self)(**{**said, **changed})
