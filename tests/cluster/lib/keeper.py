"""Keeps the logs of pods that have gone, and takes the cluster down when the process that asked for it has ended."""
import contextlib
import os
import time

from lib import cluster, daemons
from lib.settings import STATE

PODLOGS = STATE / "podlogs"
KEPT = STATE / "kept-logs"


def link_new(seen):
    """A second name for every log file that is new: what is written to it later is kept too, after the kubelet removes its own."""
    for path in PODLOGS.rglob("*.log"):
        with contextlib.suppress(OSError):
            inode = path.stat().st_ino
            if inode in seen:
                continue
            # NODE/NAMESPACE_POD_UID/CONTAINER/RESTARTS.log; rotated files keep their inode.
            node, pod, container, name = path.relative_to(PODLOGS).parts
            os.link(path, KEPT / f"{pod}_{container}_{name}")
            seen.add(inode)


def run(owner):
    KEPT.mkdir(exist_ok=True)
    seen = set()
    while STATE.exists():
        if owner and not daemons.alive(owner):
            print(f"process {owner} has ended: taking the cluster down", flush=True)
            cluster.down()
            return
        link_new(seen)
        time.sleep(0.25)
