"""What a cluster changes on this machine outside of its own folder, noted before and put back afterwards."""
import contextlib
import json
import os
import pathlib
import shlex
import subprocess

from lib import daemons
from lib.settings import BRIDGE, HOST_IP, SERVICE_CIDR, STATE

SYSCTLS = ("vm.overcommit_memory", "kernel.panic", "kernel.panic_on_oops", "net.ipv4.ip_forward",
           "net.ipv4.conf.all.route_localnet", "net.bridge.bridge-nf-call-iptables", "net.netfilter.nf_conntrack_max",
           "net.netfilter.nf_conntrack_tcp_timeout_established", "net.netfilter.nf_conntrack_tcp_timeout_close_wait")
NETNS = pathlib.Path("/var/run/netns")
CNI_RESULTS = pathlib.Path("/var/lib/cni/results")
# Folders that kubelet, containerd and the CNI plugins make wherever their own folders are.
FOLDERS = ("/var/lib/kubelet", "/run/containerd", "/var/lib/cni", "/var/log/containers", "/var/log/pods", "/var/run/netns",
           "/run/xtables.lock", "/usr/libexec/kubernetes", "/opt/cni", "/etc/cni", "/var/run/nri")
NOTES = STATE / "machine.json"


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def namespaces():
    return sorted(os.listdir(NETNS)) if NETNS.is_dir() else []


def chains():
    """(program, table, chain) of every chain of Kubernetes in the packet filter."""
    found = []
    for program in ("iptables", "ip6tables"):
        for table in ("nat", "filter", "mangle", "raw"):
            out = run(program, "-w", "5", "-t", table, "-S")
            found += [(program, table, line.split()[1]) for line in out.stdout.splitlines() if line.startswith("-N KUBE-")]
    return found


def note():
    """Before anything starts: what is there now. Refuses a machine that runs Kubernetes already."""
    if chains():
        raise RuntimeError("this machine has chains of kube-proxy in iptables: it runs Kubernetes already; set KUBECONFIG to use it")
    values = {}
    for name in SYSCTLS:
        path = pathlib.Path("/proc/sys", *name.split("."))
        if path.exists():
            values[name] = path.read_text().strip()
    NOTES.write_text(json.dumps({
        "sysctls": values, "namespaces": namespaces(), "absent": [path for path in FOLDERS if not os.path.lexists(path)]}))


def make_network():
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST_IP}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    # Addresses of services never leave this machine: what kube-proxy does not translate ends here.
    run("ip", "route", "add", "unreachable", SERVICE_CIDR)
    if HOST_IP not in run("ip", "address", "show", "dev", BRIDGE).stdout:
        raise RuntimeError(f"no bridge {BRIDGE} with {HOST_IP}; root and iproute2 are needed")


def remove_chains():
    present = chains()
    for program, table in sorted({(program, table) for program, table, _ in present}):
        rules = run(program, "-w", "5", "-t", table, "-S").stdout.splitlines()
        for rule in rules:  # Jumps from the built-in chains first, then the chains themselves.
            words = rule.split()
            if words[0] == "-A" and not words[1].startswith("KUBE-") and " KUBE-" in rule:
                run(program, "-w", "5", "-t", table, "-D", *shlex.split(rule)[1:])
        names = [chain for p, t, chain in present if (p, t) == (program, table)]
        for action in ("-F", "-X"):
            for name in names:
                run(program, "-w", "5", "-t", table, action, name)


def remove_mounts():
    for _ in range(3):
        mounts = [line.split()[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
        ours = [mount for mount in mounts if mount.startswith(f"{STATE}/")]
        if not ours:
            return
        for mount in sorted(ours, reverse=True):
            run("umount", "-l", mount)


def remove_shim_sockets():
    """containerd keeps the shims' sockets in /run/containerd/s whatever its configuration says."""
    for address in STATE.glob("nodes/*/state/io.containerd.runtime.v2.task/k8s.io/*/address"):
        with contextlib.suppress(OSError):
            pathlib.Path(address.read_text().strip().removeprefix("unix://")).unlink()


def restore():
    """After every process has ended: mounts, namespaces, links, chains, folders and sysctls as they were."""
    try:
        notes = json.loads(NOTES.read_text())
    except (OSError, ValueError):
        notes = {"sysctls": {}, "namespaces": namespaces(), "absent": []}
    remove_shim_sockets()
    remove_mounts()
    for name in namespaces():
        if name.startswith("cni-") and name not in notes["namespaces"]:
            run("ip", "netns", "delete", name)
    remove_chains()
    run("ip", "route", "delete", "unreachable", SERVICE_CIDR)
    run("ip", "link", "delete", BRIDGE)
    sandboxes = {path.name for path in STATE.glob("nodes/*/root/io.containerd.grpc.v1.cri/sandboxes/*")}
    for result in CNI_RESULTS.glob("*"):
        if result.name.startswith("diloco-test-") or any(sandbox in result.name for sandbox in sandboxes):
            result.unlink()
    if str(NETNS) in notes["absent"] and not namespaces():
        run("umount", NETNS)
    for path in notes["absent"]:
        remove_empty(pathlib.Path(path))
    for name, value in notes["sysctls"].items():
        path = pathlib.Path("/proc/sys", *name.split("."))
        with contextlib.suppress(OSError):
            if path.read_text().strip() != value:
                path.write_text(value)


def remove_empty(path):
    """Removes a folder that was not there before: the tree of empty folders, dead sockets and kubelet's own marks."""
    if path.is_file() and not path.is_symlink():
        path.unlink()
        return
    for child in sorted(path.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            if child.is_dir() and not child.is_symlink():
                child.rmdir()
            elif child.is_socket() or child.name in ("kubelet_internal_checkpoint", "DEPRECATION", ".lock"):
                child.unlink()
            elif child.is_symlink() and str(STATE) in os.readlink(child):
                child.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def leftovers():
    """What of a cluster is still on this machine, one line each; empty when it is clean."""
    found = [f"process {process}" for process in sorted(daemons.members()) if daemons.alive(process)]
    found += [f"cgroup {root}" for root in daemons.roots() if root.exists()]
    found += [f"mount {line.split()[1]}" for line in pathlib.Path("/proc/mounts").read_text().splitlines()
              if line.split()[1].startswith(f"{STATE}/")]
    found += [f"chain {' '.join(chain)}" for chain in chains()]
    if run("ip", "link", "show", BRIDGE).returncode == 0:
        found.append(f"link {BRIDGE}")
    if run("ip", "route", "show", SERVICE_CIDR).stdout.strip():
        found.append(f"route {SERVICE_CIDR}")
    if STATE.exists():
        found.append(f"folder {STATE}")
    return found
