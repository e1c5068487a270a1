"""The order in which (head, item) pairs are handed to CTAs. It cannot change a bit of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dash_kernels.problem import LAUNCH_ORDERS
from dash_kernels.schedules.schedule import Schedule

if TYPE_CHECKING:
    from dash_kernels.problem import Config


@dataclass(frozen=True, slots=True)
class Launch:
    """``order`` ranks a head's items by their first KV tile; ``heads`` of them are interleaved (0: all of them).

    CTAs draw tickets 0, 1, 2, ...; blocks of ``heads`` heads come one after another, and within a block every head's
    first item comes before any head's second. Raises ValueError for a value outside its range.
    """

    order: str = "ascending"
    heads: int = 1

    def __post_init__(self) -> None:
        if self.order not in LAUNCH_ORDERS:
            known = ", ".join(LAUNCH_ORDERS)
            raise ValueError(f"launch order is {self.order!r}; choose one of {known}")
        if not isinstance(self.heads, int) or isinstance(self.heads, bool) or self.heads < 0:
            raise ValueError(f"interleaved heads is {self.heads!r}; it must be 0 (all) or more")

    @classmethod
    def for_config(cls, config: Config) -> Launch:
        return cls(config.launch_order, config.heads_interleaved)

    def item_order(self, schedule: Schedule) -> tuple[int, ...]:
        """Launch position within a head -> item."""
        ranked = sorted(range(len(schedule.items)), key=lambda item: schedule.items[item][0])
        return tuple(ranked if self.order == "ascending" else reversed(ranked))

    def interleaved(self, total_heads: int) -> int:
        """How many heads take turns when there are ``total_heads`` of them."""
        return min(self.heads or total_heads, total_heads)

    def head_and_item(self, ticket: int, total_heads: int, num_items: int) -> tuple[int, int]:
        """Ticket -> (head, launch position within the head), as the kernels compute it.

        ``item_order`` turns the position into an item. Raises ValueError for a ticket outside
        ``0 <= ticket < total_heads * num_items``.
        """
        if not 0 <= ticket < total_heads * num_items:
            raise ValueError(
                f"ticket is {ticket}; it must be below {total_heads} heads x {num_items} items"
            )
        heads = self.interleaved(total_heads)
        block, rest = divmod(ticket, heads * num_items)
        heads_here = min(heads, total_heads - block * heads)
        return block * heads + rest % heads_here, rest // heads_here
