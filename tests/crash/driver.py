"""Runs commands in children of one process that has everything imported, and ends them.

A request is a line of JSON on stdin, the answer one on stdout. A child counts *events*: every call
that changes a folder below its working directory, and every fsync, each counted just before it
happens. At the event asked for, one of these befalls it:

    kill    SIGKILL; of a safetensors file that was about to be written, half is there.
    power   the same, and besides what was not synced is lost: content of files since their last
            fsync, renames since the last fsync of their folder.
    fill    a file takes all that is left on the disk.
    term    SIGTERM.

`after` kills at a moment instead, in seconds.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}

PATIENCE = 300.0
"""Seconds after which a child hangs."""
IMPORTED = (
    "coec.cli.commands", "coec.exporting.export", "coec.pruning", "coec.recovery.session",
    "transformers.models.llama.modeling_llama", "transformers.models.mistral.modeling_mistral",
)  # fmt: skip
"""What takes seconds, and is not to be repeated in every child."""
WRITING = os.O_WRONLY | os.O_RDWR


class Watch:
    """Counts events of this process, and ends it at one of them.

    Args:
        root: what lies below it counts.
        at: the number of the event; None for none.
        what: befalls the process there.
    """

    def __init__(self, root: Path, at: int | None, what: str) -> None:
        self.root, self.at, self.what = root, at, what
        self.events: list[tuple[str, str]] = []
        self.synced: dict[str, int] = {}  # bytes of open or written files that are on the disk
        self.renamed: list[tuple[str, str]] = []
        self.befell = False

    def start(self) -> None:
        import coec.models.files

        self.fsync, self.save = os.fsync, coec.models.files.save_file
        os.fsync = self.synced_file
        coec.models.files.save_file = self.saved
        sys.addaudithook(self.audited)

    def audited(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.befell:
            return
        if name == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and flags & WRITING and self.below(path):
                self.event("open", path)
                self.synced.setdefault(self.name(path), 0)
        elif name == "os.rename":
            source, target = arguments[:2]
            if self.below(target):
                self.event("rename", target)
                self.follow(self.name(source), self.name(target))
        elif name in ("os.remove", "os.rmdir") and arguments[1] != -1:
            # Inside shutil.rmtree a name is relative to the descriptor of its folder.
            folder = os.readlink(f"/proc/self/fd/{arguments[1]}")
            if self.below(folder):
                self.event(name.removeprefix("os."), os.path.join(folder, arguments[0]))
        elif name in ("os.remove", "os.rmdir", "os.mkdir") and self.below(arguments[0]):
            self.event(name.removeprefix("os."), arguments[0])

    def synced_file(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if not self.below(name):
            return self.fsync(descriptor)
        self.event("fsync", name)
        self.fsync(descriptor)
        if os.path.isdir(name):
            self.renamed = [pair for pair in self.renamed if os.path.dirname(pair[1]) != name]
        else:
            self.synced[name] = os.stat(name).st_size
        return None

    def saved(self, tensors: Any, path: Any, metadata: Any = None) -> None:
        if self.below(path) and len(self.events) == self.at and self.what in ("kill", "power"):
            self.save(tensors, path, metadata=metadata)
            os.truncate(path, os.stat(path).st_size // 2)
        self.event("write", path)
        self.save(tensors, path, metadata=metadata)

    def below(self, path: Any) -> bool:
        return f"{self.name(path)}/".startswith(f"{self.root}/")

    def name(self, path: Any) -> str:
        return os.path.abspath(os.fsdecode(path))

    def follow(self, source: str, target: str) -> None:
        """A rename, which takes along what a folder holds."""
        self.renamed.append((source, target))
        for name in list(self.synced):
            if name == source or name.startswith(f"{source}/"):
                self.synced[target + name.removeprefix(source)] = self.synced.pop(name)

    def event(self, kind: str, path: Any) -> None:
        number = len(self.events)
        self.events.append((kind, os.path.relpath(self.name(path), self.root)))
        if number != self.at:
            return
        self.befell = True
        if self.what == "fill":
            self.fill()
        elif self.what == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            if self.what == "power":
                self.lose()
            os.kill(os.getpid(), signal.SIGKILL)

    def lose(self) -> None:
        """What a power cut takes: all that was not synced."""
        for name, size in self.synced.items():
            if os.path.isfile(name) and os.stat(name).st_size != size:
                os.truncate(name, size)
        for source, target in reversed(self.renamed):
            if os.path.lexists(target) and not os.path.lexists(source):
                os.rename(target, source)

    def fill(self) -> None:
        with (self.root / "filler").open("wb") as file:
            try:
                while True:
                    file.write(bytes(2**16))
                    file.flush()
            except OSError:
                pass


def child(request: dict[str, Any]) -> None:
    """One run of the command; tells events and solved blocks when it comes to its end."""
    cwd = Path(request["cwd"])
    os.chdir(cwd)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import coec.checkpoint.checkpoint

    coec.checkpoint.checkpoint.MAX_SHARD = request.get(
        "shard", coec.checkpoint.checkpoint.MAX_SHARD
    )
    keep, solved = coec.checkpoint.checkpoint.Checkpoint.keep, []

    def kept(checkpoint: Any, blocks: Any) -> None:
        solved.extend(coec.checkpoint.checkpoint._units(block.block) for block in blocks)
        keep(checkpoint, blocks)

    coec.checkpoint.checkpoint.Checkpoint.keep = kept
    watch = Watch(cwd, request.get("at"), request.get("what", "kill"))
    watch.start()
    sys.argv = ["coec", *request["argv"]]
    status: Any = 0
    try:
        coec.cli.main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = "an exception"
    finally:
        watch.befell = True
        told = {"events": watch.events, "solved": solved, "status": status}
        Path(request["told"]).write_text(json.dumps(told))
        sys.stdout.flush()
        os._exit(0)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a child, ends it after `after` seconds where that is asked for; how it ended."""
    Path(request["told"]).unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        child(request)
    if request.get("after") is not None:
        time.sleep(request["after"])
        os.kill(pid, signal.SIGKILL)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > PATIENCE:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"status": "hang"}
        time.sleep(0.005)
    seconds = time.monotonic() - began
    if os.WIFSIGNALED(ended[1]):
        return {"status": -os.WTERMSIG(ended[1]), "seconds": seconds}
    return json.loads(Path(request["told"]).read_text()) | {"seconds": seconds}


def main() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
