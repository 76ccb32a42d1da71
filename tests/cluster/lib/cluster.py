"""Brings the test cluster up and takes it down."""
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

from lib import daemons, dns, machine, nodes, pki, volumes
from lib.settings import HERE, HOST_IP, KUBECONFIG, NODES, POD_CIDR, ROOT, SERVICE_CIDR, STATE, fail, say, tools

PACKAGES = "etcd-server containerd runc containernetworking-plugins iptables conntrack iproute2"
FACTS = STATE / "cluster.json"


def facts():
    """What `up` wrote once everything was ready, or None."""
    try:
        return json.loads(FACTS.read_text())
    except (OSError, ValueError):
        return None


def is_up():
    found = facts()
    return bool(found) and all(daemons.pid(name) for name in found["daemons"])


def free_port(address):
    with socket.socket() as s:
        s.bind((address, 0))
        return s.getsockname()[1]


def kubectl(*arguments, text=None):
    out = subprocess.run([tools() / "kubectl", "--kubeconfig", KUBECONFIG, *arguments], input=text, text=True,
                         capture_output=True, check=False)
    if out.returncode != 0:
        raise RuntimeError(f"kubectl {' '.join(arguments)}: {out.stderr.strip()}")
    return out.stdout


def apply(objects):
    kubectl("apply", "--server-side", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def answers(url, context=None):
    with contextlib.suppress(OSError, urllib.error.URLError):
        with urllib.request.urlopen(url, timeout=2, context=context) as reply:
            return reply.status == 200
    return False


def start_control_plane(bin_dir, port):
    keys = STATE / "pki"
    client, peer = (f"http://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    daemons.start("etcd", [
        "etcd", "--name", "test", "--data-dir", STATE / "etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}",
        "--unsafe-no-fsync"])
    daemons.wait("etcd", 30, lambda: answers(f"{client}/health"))
    daemons.start("kube-apiserver", [
        bin_dir / "kube-apiserver", f"--etcd-servers={client}", f"--bind-address={HOST_IP}", f"--advertise-address={HOST_IP}",
        f"--secure-port={port}", f"--tls-cert-file={keys}/apiserver.crt", f"--tls-private-key-file={keys}/apiserver.key",
        f"--client-ca-file={keys}/ca.crt", "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys}/sa.pub", f"--service-account-signing-key-file={keys}/sa.key",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={SERVICE_CIDR}", "--allow-privileged=true",
        f"--kubelet-client-certificate={keys}/apiserver-kubelet.crt", f"--kubelet-client-key={keys}/apiserver-kubelet.key",
        f"--kubelet-certificate-authority={keys}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={keys}/ca.crt", "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-", f"--proxy-client-cert-file={keys}/front.crt",
        f"--proxy-client-key-file={keys}/front.key", "--enable-aggregator-routing=true", "--profiling=false"])
    trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    daemons.wait("API server", 120, lambda: answers(f"https://{HOST_IP}:{port}/readyz", trusted))
    daemons.start("kube-controller-manager", [
        bin_dir / "kube-controller-manager", f"--kubeconfig={keys}/controllers.kubeconfig", "--secure-port=0",
        f"--service-account-private-key-file={keys}/sa.key", f"--root-ca-file={keys}/ca.crt",
        f"--cluster-signing-cert-file={keys}/ca.crt", f"--cluster-signing-key-file={keys}/ca.key",
        "--use-service-account-credentials=true", f"--service-cluster-ip-range={SERVICE_CIDR}", "--leader-elect=false",
        "--kube-api-qps=50", "--kube-api-burst=100",
        # A stopped node is told after 10 s, an autoscaler acts at once: tests wait for both.
        "--node-monitor-period=1s", "--node-monitor-grace-period=10s", "--horizontal-pod-autoscaler-sync-period=2s",
        "--horizontal-pod-autoscaler-downscale-stabilization=2s"])
    daemons.start("kube-scheduler", [
        bin_dir / "kube-scheduler", f"--kubeconfig={keys}/scheduler.kubeconfig", "--secure-port=0", "--leader-elect=false"])


def build_images(bin_dir):
    """The two images that a cluster without a registry needs for itself."""
    images = STATE / "images"
    images.mkdir(exist_ok=True)
    subprocess.run(["gcc", "-static", "-Os", "-s", "-o", images / "pause", HERE / "pause.c"], check=True)
    for name, reference, path, entry in (("pause", nodes.PAUSE_IMAGE, images / "pause", "/pause"),
                                         ("coredns", dns.IMAGE, bin_dir / "coredns", "/coredns")):
        subprocess.run([sys.executable, ROOT / "images" / "build_oci.py", "--single", images / f"{name}.tar", reference,
                        f"{entry}={path}", "--", entry], check=True, stdout=subprocess.DEVNULL)
    return [images / "pause.tar", images / "coredns.tar"]


def start_nodes(bin_dir):
    nodes.write_network()
    for node in NODES:
        nodes.start_containerd(node)
    archives = build_images(bin_dir)
    for node in NODES:
        daemons.wait(f"containerd of {node}", 30, lambda node=node: nodes.containerd_ready(node))
    for archive in archives:
        nodes.import_image(archive)
    for node in NODES:
        nodes.start_kubelet(bin_dir, node, free_port(HOST_IP))
    daemons.start("kube-proxy", [
        bin_dir / "kube-proxy", f"--kubeconfig={STATE}/pki/proxy.kubeconfig", f"--hostname-override={NODES[0]}",
        f"--cluster-cidr={POD_CIDR}", "--proxy-mode=iptables", f"--bind-address={HOST_IP}",
        f"--healthz-bind-address=127.0.0.1:{free_port('127.0.0.1')}", f"--metrics-bind-address=127.0.0.1:{free_port('127.0.0.1')}",
        "--conntrack-max-per-core=0", "--nodeport-addresses=127.0.0.0/8"])


def nodes_ready():
    with contextlib.suppress(RuntimeError):
        items = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
        ready = [item for item in items for condition in item["status"].get("conditions", [])
                 if condition["type"] == "Ready" and condition["status"] == "True"]
        return len(ready) == len(NODES)
    return False


def dns_ready():
    with contextlib.suppress(RuntimeError):
        return json.loads(kubectl("get", "-n", "kube-system", "deployment", "coredns", "-o", "json"))["status"].get("readyReplicas")
    return False


@contextlib.contextmanager
def locked(name="diloco-cluster", seconds=180, what="`up` or `down`"):
    """One of a kind at a time on this machine; waits for the other one."""
    folder = "/run/lock" if os.path.isdir("/run/lock") else "/tmp"
    with open(f"{folder}/{name}", "w", encoding="ascii") as lock:
        deadline = time.monotonic() + seconds
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    fail(f"another {what} has been at it for {seconds} s")
                if not told and seconds > 180:
                    say(f"waiting for another {what} on this machine")
                    told = True
                time.sleep(0.2)
        yield


def tests_locked(seconds=2400):
    """Held by what uses the cluster for longer: a run of the tests, the demonstration."""
    return locked("diloco-cluster-tests", seconds, "run of the cluster tests")


def check_requirements():
    if os.geteuid() != 0:
        fail("needs root: it starts containers. Or set KUBECONFIG to use a cluster that runs")
    missing = [program for program in ("etcd", "containerd", "ctr", "runc", "iptables", "ip", "openssl", "gcc")
               if not shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")]
    if missing:
        fail(f"not installed: {', '.join(missing)} (Debian packages: {PACKAGES})")


def owner_alive(found):
    return bool(found) and bool(found.get("owner")) and daemons.alive(found["owner"])


def up(owner=None):
    """Starts the cluster unless it is up. With `owner` (a process id) it is taken down when that process ends."""
    check_requirements()
    bin_dir = tools()
    if not (bin_dir / "coredns").exists():
        subprocess.run([HERE / "build_tools.sh"], check=True, stdout=sys.stderr)
    with locked():
        found = facts()
        if is_up():
            if owner and owner_alive(found) and found["owner"] != owner:
                fail(f"the cluster on this machine belongs to process {found['owner']}")
            return False
        if STATE.exists():
            say("clearing what an earlier cluster left")
            take_down()
        started = time.monotonic()
        STATE.mkdir(parents=True)
        STATE.chmod(0o711)
        try:
            start_everything(bin_dir, owner)
        except BaseException:
            keep_logs_of_failure()
            take_down()
            raise
        say(f"two nodes and DNS ready after {time.monotonic() - started:.1f} s")
        return True


def start_everything(bin_dir, owner):
    machine.note()
    daemons.make_cgroups()
    machine.make_network()
    volumes.make()
    port = free_port(HOST_IP)
    pki.make(port)
    watch_over(owner)
    start_control_plane(bin_dir, port)
    start_nodes(bin_dir)
    apply(volumes.objects() + dns.objects())
    daemons.wait("two nodes Ready", 120, nodes_ready, 0.3)
    daemons.wait("default service account", 60, default_account, 0.3)
    daemons.wait("cluster DNS", 90, dns_ready, 0.3)
    names = sorted(path.stem for path in (STATE / "run").glob("*.pid") if path.stem != "keeper")
    FACTS.write_text(json.dumps({"daemons": names, "owner": owner, "server": f"https://{HOST_IP}:{port}"}))


def default_account():
    with contextlib.suppress(RuntimeError):
        return kubectl("get", "serviceaccount", "default", "-o", "name")
    return False


def keep_logs_of_failure():
    """The daemons' last words outlive a failed start."""
    target = ROOT / "build" / "log" / "cluster-start"
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError):
        shutil.copytree(STATE / "logs", target)
        say(f"start failed; logs in {target}")


def watch_over(owner):
    """A process of its own keeps the logs of pods that go, and takes the cluster down when `owner` has ended."""
    (STATE / "run").mkdir(exist_ok=True)
    with open(STATE / "keeper.log", "ab") as log:
        keeper = subprocess.Popen([sys.executable, HERE / "cluster.py", "keep", str(owner or 0)], stdin=subprocess.DEVNULL,
                                  stdout=log, stderr=log, start_new_session=True, cwd="/")
    (STATE / "run" / "keeper.pid").write_text(str(keeper.pid))


def end_keeper():
    with contextlib.suppress(OSError, ValueError):
        number = int((STATE / "run" / "keeper.pid").read_text())
        command = open(f"/proc/{number}/cmdline", "rb").read().split(b"\0")
        if number != os.getpid() and b"keep" in command and str(HERE / "cluster.py").encode() in command:
            os.kill(number, signal.SIGKILL)


def take_down():
    """Without the lock: for `up` and `down`. Safe to repeat, and on a machine without a cluster."""
    end_keeper()
    daemons.end_all()
    machine.restore()
    left = daemons.remove_cgroups()
    shutil.rmtree(STATE, ignore_errors=True)
    if left:
        say(f"cgroups that could not be removed: {' '.join(left)}")


def down():
    with locked():
        take_down()
    left = machine.leftovers()
    for line in left:
        say(f"left behind: {line}")
    return not left
