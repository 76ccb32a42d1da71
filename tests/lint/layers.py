#!/usr/bin/env python3
"""Who may include whom (docs/architecture.md, "Folders"): layers.py ROOT. Fails when it looked at nothing."""
import pathlib
import re
import sys

# Folder -> folders whose headers it may include, besides its own.
MAY = {
    "common": set(),
    "syncer": {"common"},
    "worker": {"common"},
    "operator": {"common"},
    "sim": {"common", "syncer", "worker", "operator"},
    "tests": {"common", "syncer", "worker", "operator", "sim"},
    "docs": {"worker"},
}
# Cores decide and do no I/O: none of these headers below them.
PURE = ("syncer/core", "syncer/merge", "operator/reconcile", "worker/link/link", "sim")
IMPURE = {"sys/socket.h", "sys/epoll.h", "poll.h", "fcntl.h", "unistd.h", "curl/curl.h", "libwebsockets.h", "sqlite3.h",
          "common/clock.h", "common/log.h", "signal.h", "netdb.h", "time.h"}
# Executing a recorded run again reads tapes and files; nothing else of the simulation does.
IMPURE_WITHIN = ("sim/replay",)
# Only replay puts the syncer's store and the trainer beside the cores.
REPLAY_ONLY = ("syncer/store/", "worker/train/", "worker/data/", "worker/model/", "worker/link/store.h")
# The merge pool is threads by nature; everything else in the folder is pure.
PURE_BUT_THREADS = ("syncer/merge/pool",)
# Only the public face of the link may be used by the built-in trainer.
TRAINER = ("worker/train", "worker/main_", "worker/data", "worker/model")

# Within the operator: the client of the API knows no jobs (but reads JSON as the core does), the core knows nobody.
WITHIN = {
    "operator/reconcile/": ("operator/kube/", "operator/controller/", "operator/local/", "operator/cli/"),
    "operator/kube/": ("operator/controller/", "operator/local/", "operator/cli/"),
    "operator/controller/": ("operator/local/", "operator/cli/"),
    "operator/local/": ("operator/kube/", "operator/controller/"),
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    faults = []
    includes = 0
    for folder, may in MAY.items():
        for path in sorted((root / folder).rglob("*.[ch]")):
            name = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                includes += 1
                target = match.group(2)
                top = target.split("/")[0]
                if match.group(1) == '"' and top in MAY and top != folder and top not in may:
                    faults.append(f"{name}:{number}: {folder} may not include {target}")
                if any(name.startswith(inner) and target.startswith(outer) for inner, outer in WITHIN.items()):
                    faults.append(f"{name}:{number}: may not include {target}")
                if name.startswith(PURE) and not name.startswith(PURE_BUT_THREADS + IMPURE_WITHIN) and target in IMPURE:
                    faults.append(f"{name}:{number}: a core without I/O includes {target}")
                if top != folder and folder == "sim" and not name.startswith(IMPURE_WITHIN) and target.startswith(REPLAY_ONLY):
                    faults.append(f"{name}:{number}: only sim/replay may include {target}")
                if name.startswith(TRAINER) and target.startswith("worker/link/") and target != "worker/link/diloco.h":
                    faults.append(f"{name}:{number}: the trainer uses only worker/link/diloco.h, not {target}")
    if includes == 0:
        faults.append("layers: found no include at all; wrong folder?")
    for fault in faults:
        print(fault)
    print(f"layers: {includes} includes, {len(faults)} faults")
    return 1 if faults else 0


sys.exit(main())
