"""Releases as pages and API show them: what each changed, which answers, and what newer measurements would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash_kernels.lookup import LookupTable
from dash_kernels.table_diff import TableDiff, diff
from dashboard.snapshot import Snapshot
from tuner.export import lookup_table, rfc3339
from tuner.results.rows import Release, StoreError
from tuner.results.store import Store
from tuner.winners import age

SHOWN = 8


def before(known: Sequence[Release], release: Release) -> Release | None:
    """The release of the same GPU before this one; ``known`` are the GPU's, newest first."""
    place = [other.id for other in known].index(release.id)
    return known[place + 1] if place + 1 < len(known) else None


def compared(older: Release | None, table: LookupTable) -> TableDiff:
    """What changes from ``older``, or from nothing, to ``table``."""
    if older is None:
        return diff(LookupTable(table.gpu, "", "", ()), table)
    return diff(LookupTable.from_dict(older.to_dict()), table)


def described(store: Store, known: Sequence[Release], answers: int | None) -> list[dict[str, Any]]:
    """Each of a GPU's releases, newest first, with what it changed; ``answers`` is the number of the one that answers."""
    return [_described(store, known, release, release.id == answers) for release in known]


def _described(
    store: Store, known: Sequence[Release], release: Release, answers: bool
) -> dict[str, Any]:
    older = before(known, release)

    def compare() -> tuple[int, str | None]:
        table = LookupTable.from_dict(release.to_dict())
        changes = None if older is None else compared(older, table).summary()
        return len(table.cells), changes

    # Both are immutable: what changed between them is worked out once.
    key = ("changes", release.digest, older.digest if older else None)
    cells, changes = store.remember(key, compare)
    return {
        "id": release.id,
        "gpu": release.gpu,
        "name": release.name,
        "digest": release.digest,
        "notes": release.notes,
        "cells": cells,
        "created_at": release.created_at,
        "served": answers,
        "changes": changes,
        "table": f"releases/{release.id}/table.json",
    }


def unreleased(store: Store, snapshot: Snapshot, release: Release) -> dict[str, Any] | None:
    """What measurements since ``release`` would change, None where they would change nothing.

    A new sweep answers only who asks for a draft, until it is released: that is said here, with the command.
    """
    if not snapshot.cells or snapshot.source != "measured":
        return None

    def compare() -> dict[str, Any] | None:
        try:
            table = lookup_table(store, release.gpu, cells=snapshot.cells)
        except StoreError:
            return None
        found = compared(release, LookupTable.from_dict(table))
        changed = [change for change in found.changes if change.change != "removed"]
        if not changed:
            return None
        newest = max((c.best.row for c in snapshot.cells), key=age).created_at
        return {
            "cells": len(changed),
            "bits_change": sum(change.bits for change in changed),
            "newest": rfc3339(newest) if newest else None,
            "how": f"release=draft answers from them; dash-tune release --gpu {release.gpu} freezes them",
        }

    return store.remember(("unreleased", release.digest, snapshot.last_id), compare)


def section(
    store: Store, known: Sequence[Release], answers: Release | None, snapshot: Snapshot
) -> dict[str, Any]:
    """The card of the page: the newest releases of the GPU, and a line about what none of them has."""
    listed = described(store, known[:SHOWN], answers.id if answers else None)
    rows = [
        {
            "id": row["id"],
            "name": row["name"],
            "date": f"{row['created_at']:%Y-%m-%d %H:%M}",
            "cells": row["cells"],
            "changes": row["changes"] or "the first",
            "notes": row["notes"],
            "served": row["served"],
            "table": row["table"],
            "digest": row["digest"][:12],
        }
        for row in listed
    ]
    gpu = snapshot.gpu
    if answers is None:
        line = f"None yet: dash-tune release --gpu {gpu} freezes the winners shown here."
        if known:
            line = "None of them answers /best here: the release to which this server is pinned does not exist."
        return {"rows": rows, "line": line, "newer": False}
    newer = unreleased(store, snapshot, answers)
    if newer is None:
        line = f"/best and choose() answer from release {answers.id}, {answers.name}: the winners shown here."
        return {"rows": rows, "line": line, "newer": False}
    cells, bits = newer["cells"], newer["bits_change"]
    line = (
        f"/best answers from release {answers.id}, {answers.name}. The rows shown here are newer: they would change "
        f"{cells} {'cell' if cells == 1 else 'cells'}, in {bits or 'none'} of them also bits. "
        f"dash-tune release --gpu {gpu} freezes them."
    )
    return {"rows": rows, "line": line, "newer": True}
