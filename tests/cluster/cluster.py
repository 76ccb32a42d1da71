#!/usr/bin/env python3
"""A real Kubernetes of two nodes with DNS on this machine, without a container engine or a registry. Needs root.

    cluster.py up [--owner PID]   start it, unless it is up; taken down again when process PID ends
    cluster.py down [--now]       end it and put everything back as it was; safe to repeat; not under running tests, unless --now
    cluster.py status             is it up, what runs, what is left behind; exit status 0 when up
    cluster.py env                lines for a shell: export KUBECONFIG=... PATH=...
    cluster.py import FILE.tar... make OCI archives known to both nodes
    cluster.py stop|continue NODE freeze a node, its kubelet and its containers (it becomes NotReady), and let it go on

README.md beside this file says how it is made.
"""
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import cluster, daemons, keeper, machine, nodes  # noqa: E402
from lib.settings import KUBECONFIG, fail, say, tools  # noqa: E402


def status():
    if cluster.is_up():
        found = cluster.facts()
        say(f"up at {found['server']}, {len(daemons.members())} processes" +
            (f", taken down when process {found['owner']} ends" if found["owner"] else ""))
        return 0
    left = machine.leftovers()
    say("not up" + (", but left behind: " if left else ""))
    for line in left:
        print(f"  {line}")
    return 1


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command == "up":
        owner = int(rest[rest.index("--owner") + 1]) if "--owner" in rest else None
        if not cluster.up(owner):
            say("is up already")
        return 0
    if command == "down":
        if "--now" in rest:
            return 0 if cluster.down() else 1
        with cluster.tests_locked(1):
            return 0 if cluster.down() else 1
    if command == "status":
        return status()
    if command == "env":
        print(f"export KUBECONFIG={KUBECONFIG} PATH={tools()}:$PATH")
        return 0
    if command == "keep":
        keeper.run(int(rest[0]))
        return 0
    if command == "import" and rest:
        for archive in rest:
            nodes.import_image(archive)
        return 0
    if command in ("stop", "continue") and rest:
        process = daemons.pid(f"kubelet-{rest[0]}") or fail(f"no kubelet of {rest[0]} runs")
        os.kill(process, signal.SIGSTOP if command == "stop" else signal.SIGCONT)
        daemons.freeze(rest[0], command == "stop")
        return 0
    fail(f"what is '{' '.join(arguments)}'? See --help")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that a start that is ended clears up after itself.
    sys.exit(main(sys.argv[1:]))
