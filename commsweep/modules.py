"""Lists of modules that know what they hold, for readers and type checkers."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Generic, TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)


class NamedModules(nn.ModuleDict, Generic[M]):
    """A ModuleDict of modules of one class."""

    def __getitem__(self, name: str) -> M:
        return cast(M, super().__getitem__(name))

    def values(self) -> ValuesView[M]:
        """The modules, in order."""
        return cast("ValuesView[M]", super().values())

    def items(self) -> ItemsView[str, M]:
        """Names and modules, in order."""
        return cast("ItemsView[str, M]", super().items())


class Modules(nn.ModuleList, Generic[M]):
    """A ModuleList of modules of one class."""

    def __iter__(self) -> Iterator[M]:
        return cast(Iterator[M], super().__iter__())

    def __getitem__(self, index: int) -> M:
        return cast(M, super().__getitem__(index))
