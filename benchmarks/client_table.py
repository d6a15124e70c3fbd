"""The matrix of docs/lab/CLIENTS.md, made of the rows that `benchmarks.clients` keeps."""

from itertools import groupby

from benchmarks import record
from benchmarks.client_models import Checkpoint
from benchmarks.clients import CLIENTS, OWN, Row

_LONGEST = 120
"""Characters of a message that are shown."""


def rendered(rows: list[Row]) -> str:
    """Return the versions, the table, and the errors that it has by number."""
    ran = [row for row in rows if row.client != OWN]
    clients = [key for key in CLIENTS if any(row.client == key for row in ran)]
    errors = list(dict.fromkeys(row.error for row in ran if row.error))
    found = {(row.client, row.checkpoint.name): row for row in ran}
    checkpoints = list({row.checkpoint.name: row.checkpoint for row in ran}.values())
    lines = []
    for _, same in groupby(checkpoints, key=lambda one: one.subject):
        for group in _alike(list(same), clients, found):
            cells = [_cell([found.get((key, one.name)) for one in group], errors)
                     for key in clients]  # fmt: skip
            ways = "; ".join(one.way for one in group)
            lines.append([group[0].subject, ways, group[0].stored or "", *cells])
    parts = [
        _versions(ran, clients),
        record.table(
            ["model", "pruned", "stored as", *(CLIENTS[key].name for key in clients)], lines
        ),
        "\n".join(f"{at}. `{text[:_LONGEST]}`" for at, text in enumerate(errors, 1)),
    ]
    return "\n\n".join(parts)


def _alike(
    checkpoints: list[Checkpoint], clients: list[str], found: dict[tuple[str, str], Row]
) -> list[list[Checkpoint]]:
    """Checkpoints of one subject, those together that every client treats alike."""
    groups: dict[tuple, list[Checkpoint]] = {}
    for one in checkpoints:
        rows = [found.get((key, one.name)) for key in clients]
        key = (one.stored, one.biased, *((row.error, row.right) if row else None for row in rows))
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _cell(rows: list[Row | None], errors: list[str]) -> str:
    """The largest difference, bold where it is none of rounding; or the number of an error."""
    known = [row for row in rows if row is not None]
    if not known:
        return "–"
    if known[0].error:
        return f"[{errors.index(known[0].error) + 1}]"
    largest = f"{max(row.share or 0 for row in known):.0e}".replace("e-0", "e-")
    return largest if all(row.right for row in known) else f"**{largest}**"


def _versions(rows: list[Row], clients: list[str]) -> str:
    """One sentence per client."""
    said = []
    for key in clients:
        versions = next((row.versions for row in rows if row.client == key and row.versions), {})
        names = ", ".join(f"{name} {version}" for name, version in versions.items())
        said.append(f"{CLIENTS[key].name}: {names}")
    return "; ".join(said) + "."
