"""How a file is spoiled: by bytes, by lines, or by what its JSON says."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ODD = (
    None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308,
    1e-320, float("nan"), float("inf"), "", " ", "0", "-1", "x", "x" * 300, "a\0b", "..", "/",
    "../../etc",
    "\ud800", "é", "[" * 2000, "model.safetensors", "llama", "auto", [], [None], [[]], {}, {"": {}},
)  # fmt: skip
"""Values that nobody writes."""


def flip(content: bytes, draw: Random) -> bytes:
    spoiled = bytearray(content)
    for _ in range(draw.choice((1, 1, 3, 30))):
        if spoiled:
            spoiled[draw.randrange(len(spoiled))] ^= 1 << draw.randrange(8)
    return bytes(spoiled)


def cut(content: bytes, draw: Random) -> bytes:
    first = draw.randrange(len(content) + 1)
    last = draw.randrange(first, len(content) + 1)
    return draw.choice((content[:first], content[last:], content[:first] + content[last:]))


def insert(content: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    piece = draw.choice(
        (draw.randbytes(8), b"\0" * 64, b"\xff" * 8, b"[" * 3000, b"9" * 5000, b"\n", b'"', b"{}")
    )
    return content[:place] + piece + content[place:]


def repeat(content: bytes, draw: Random) -> bytes:
    first = draw.randrange(len(content) + 1)
    last = draw.randrange(first, len(content) + 1)
    return content[:last] + content[first:]


def lines(content: bytes, draw: Random) -> bytes:
    rows = content.split(b"\n")
    index = draw.randrange(len(rows))
    match draw.randrange(4):
        case 0:
            del rows[index]
        case 1:
            rows.insert(index, rows[draw.randrange(len(rows))])
        case 2:
            draw.shuffle(rows)
        case _:
            name, _, _ = rows[index].partition(b"=")
            odd = json.dumps(draw.choice(ODD), ensure_ascii=draw.random() < 0.8)
            rows[index] = name + b"= " + odd.encode("utf-8", "surrogatepass")
    return b"\n".join(rows)


def empty(content: bytes, draw: Random) -> bytes:
    return draw.choice((b"", b" ", b"\n", b"null", b"{}", b"[]", b"\0" * 100))


BLIND: tuple[Callable[[bytes, Random], bytes], ...] = (flip, flip, cut, insert, repeat, empty)


def in_json(content: bytes, draw: Random) -> bytes:
    """One value of a JSON document becomes odd, goes, or gets another name."""
    try:
        tree = json.loads(content)
    except ValueError:
        return flip(content, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        holder, key = _place(tree, draw)
        if holder is None:
            return json.dumps(draw.choice(ODD)).encode()
        match draw.randrange(5):
            case 0 if isinstance(holder, dict):
                holder[draw.choice(("", "x", "auto_map", "text", "model_type"))] = holder.pop(key)
            case 1:
                del holder[key]
            case 2 if isinstance(holder[key], int | float) and holder[key]:
                factor = draw.choice((-1, 2, 0.5, 10, 1e6, 1e30))
                holder[key] = type(holder[key])(holder[key] * factor)
            case _:
                holder[key] = draw.choice(ODD)
    return json.dumps(tree).encode()


def _place(tree: Any, draw: Random) -> tuple[Any, Any]:
    """A container and one of its keys, somewhere in the tree; None where there is none."""
    holder, key = None, None
    while isinstance(tree, dict | list) and tree:
        holder = tree
        key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
        tree = tree[key]
        if draw.random() < 0.3:
            break
    return holder, key


def in_json_line(content: bytes, draw: Random) -> bytes:
    rows = content.split(b"\n")
    index = draw.randrange(len(rows))
    rows[index] = in_json(rows[index], draw)
    return b"\n".join(rows)


def in_header(content: bytes, draw: Random) -> bytes:
    """The header of a safetensors file: names, dtypes, shapes, offsets."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = in_json(content[8 : 8 + length], draw), content[8 + length :]
    if draw.random() < 0.1:
        length = draw.choice((0, 1, 2**40, 2**63))
    else:
        length = len(header)
    return struct.pack("<Q", length) + header + body


def in_values(content: bytes, draw: Random) -> bytes:
    """Weights that are NaN, infinite, huge or 0 in places; the file is whole."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + length], bytearray(content[8 + length :])
    code, size = ("<d", 8) if b'"F64"' in header else ("<f", 4)
    value = draw.choice((float("nan"), float("inf"), 3e38, 1e-42, 0.0, -1.0))
    for _ in range(draw.choice((1, 50))):
        place = size * draw.randrange(max(1, len(body) // size))
        body[place : place + size] = struct.pack(code, value)
    return content[: 8 + length] + bytes(body)


AWARE: dict[str, tuple[Callable[[bytes, Random], bytes], ...]] = {
    ".json": (in_json,),
    ".jsonl": (in_json_line, lines),
    ".toml": (lines,),
    ".txt": (lines,),
    ".safetensors": (in_header, in_values),
}


def spoil(path: Path, draw: Random) -> str:
    """Changes one file in place, and says how."""
    if draw.random() < 0.06:
        return _misplaced(path, draw)
    aware = AWARE.get(path.suffix)
    kinds = aware if aware and draw.random() < 0.65 else BLIND
    kind = draw.choice(kinds)
    path.write_bytes(kind(path.read_bytes(), draw))
    return kind.__name__


def _misplaced(path: Path, draw: Random) -> str:
    """Not there, a folder, or a circle of links."""
    path.unlink()
    kind = draw.choice(("gone", "folder", "loop", "dangling"))
    if kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to(path if kind == "loop" else path.with_name("nowhere"))
    return kind
