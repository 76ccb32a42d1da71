"""Processes of the test cluster: started in one cgroup of their own, ended by it. Never by name."""
import contextlib
import os
import pathlib
import signal
import subprocess
import time

from lib.settings import CGROUP, NODES, STATE

HIERARCHIES = pathlib.Path("/sys/fs/cgroup")
V2 = (HIERARCHIES / "cgroup.controllers").exists()


def roots():
    """Our cgroup in each mounted hierarchy; the first is the one that daemons are put in."""
    if V2:
        return [HIERARCHIES / CGROUP]
    return [HIERARCHIES / name / CGROUP for name in sorted(os.listdir(HIERARCHIES), key=lambda n: (n != "pids", n))
            if (HIERARCHIES / name).is_dir() and not (HIERARCHIES / name).is_symlink()]


def make_cgroups():
    """The cgroups that the kubelets are rooted in, in every hierarchy, and that of the daemons."""
    for root in roots():
        if root.parent.name == "unified":  # Beside version 1, where runc makes what it needs.
            continue
        for path in (root, root / "daemons", *(root / node for node in NODES)):
            path.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # Empty in a new cgroup of version 1, where nothing may then run.
                if not V2 and (path / name).exists():
                    (path / name).write_text((path.parent / name).read_text())


def alive(pid):
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def start(name, command, environment=None):
    """Starts `command` as a daemon; its output goes to logs/NAME.log."""
    join = roots()[0] / "daemons" / "cgroup.procs"
    (STATE / "logs").mkdir(exist_ok=True)
    (STATE / "run").mkdir(exist_ok=True)
    with open(STATE / "logs" / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            # The shell joins the cgroup before the program runs, so that no child can be outside of it.
            ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(join), *map(str, command)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **(environment or {})})
    (STATE / "run" / f"{name}.pid").write_text(str(process.pid))
    return process.pid


def pid(name):
    """The daemon's process id, or None when it does not run any more."""
    try:
        number = int((STATE / "run" / f"{name}.pid").read_text())
    except (OSError, ValueError):
        return None
    return number if number in members() and alive(number) else None


def members():
    """Every process in our cgroup and below."""
    found = set()
    for procs in roots()[0].rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found.update(int(line) for line in procs.read_text().split())
    return found


def wait(what, seconds, condition, every=0.1):
    """Polls `condition` until it is true; its value. Raises TimeoutError, with the daemons' last words."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds} s\n" + last_words())
        time.sleep(every)


def last_words():
    out = []
    for log in sorted((STATE / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-4:]
        out += [f"--- {log.name}"] + [line[:300] for line in lines]
    return "\n".join(out)


def freeze(node, frozen):
    """Stops or continues every container of a node, as a machine that has lost its power or its network would look."""
    if V2:
        (HIERARCHIES / CGROUP / node / "cgroup.freeze").write_text("1" if frozen else "0")
    else:
        (HIERARCHIES / "freezer" / CGROUP / node / "freezer.state").write_text("FROZEN" if frozen else "THAWED")


def signal_all(number):
    for process in members():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_all():
    """Ends every process in our cgroup: stopped ones too, and those that are being started meanwhile."""
    for node in NODES:  # What is frozen does not die.
        with contextlib.suppress(OSError):
            freeze(node, False)
    deadline = time.monotonic() + 30
    while any(alive(process) for process in members()):
        signal_all(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the cluster that do not end: {sorted(members())}")
        time.sleep(0.05)


def remove_cgroups():
    left = []
    for root in roots():
        if root.exists():
            # Zombies hold a cgroup until they are reaped.
            deadline = time.monotonic() + 15
            while root.exists():
                for path in sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True) + [root]:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                if time.monotonic() > deadline:
                    left.append(str(root))
                    break
                if root.exists():
                    time.sleep(0.1)
    return left
