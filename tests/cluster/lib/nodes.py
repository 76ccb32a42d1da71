"""Two real nodes on one machine: each its own containerd and kubelet, sharing a bridge and kube-proxy."""
import json
import shutil
import subprocess

from lib import daemons
from lib.settings import BRIDGE, CGROUP, DNS_IP, HOST_IP, NODES, POD_CIDR, STATE

PAUSE_IMAGE = "localhost/diloco-pause:1"


def folder(node):
    return STATE / "nodes" / node


def address(node):
    return folder(node) / "c.sock"


def write_network():
    conf = STATE / "cni" / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    (conf / "10-diloco.conflist").write_text(json.dumps({
        "cniVersion": "1.0.0", "name": "diloco-test", "plugins": [{
            "type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "hairpinMode": True,
            "ipam": {"type": "host-local", "dataDir": f"{STATE}/cni/ipam", "ranges": [[{"subnet": POD_CIDR}]],
                     "routes": [{"dst": "0.0.0.0/0"}]}}]}))


def write_containerd(node):
    base = folder(node)
    base.mkdir(parents=True, exist_ok=True)
    runc = shutil.which("runc", path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE (root in a container) no sandbox starts otherwise.
    (base / "containerd.toml").write_text(f"""version = 2
root = "{base}/root"
state = "{base}/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{base}/c.sock"
[ttrpc]
  address = "{base}/c.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{base}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        Root = "{base}/runc"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{STATE}/cni/conf"
""")


def write_kubelet(node, port):
    pki, base = STATE / "pki", folder(node)
    (base / "resolv.conf").write_text(f"nameserver {HOST_IP}\n")
    # Short periods: a node that stops is told within some seconds, which the tests wait for.
    (base / "kubelet.json").write_text(json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": HOST_IP, "port": port, "healthzPort": 0,
        "failCgroupV1": False, "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{CGROUP}/{node}", "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{address(node)}",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False},
                           "x509": {"clientCAFile": f"{pki}/ca.crt"}},
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": f"{pki}/{node}.crt", "tlsPrivateKeyFile": f"{pki}/{node}.key",
        "clusterDomain": "cluster.local", "clusterDNS": [DNS_IP], "resolvConf": f"{base}/resolv.conf",
        "podLogsDir": f"{STATE}/podlogs/{node}", "volumePluginDir": f"{base}/volume-plugins",
        "imageGCHighThresholdPercent": 100, "enforceNodeAllocatable": ["pods"],
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "2s", "nodeStatusReportFrequency": "10s", "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s", "serializeImagePulls": False,
        "crashLoopBackOff": {"maxContainerRestartPeriod": "10s"},
        "featureGates": {"KubeletCrashLoopBackOffMax": True}}))


def start_containerd(node):
    write_containerd(node)
    daemons.start(f"containerd-{node}", ["containerd", "-c", folder(node) / "containerd.toml"])


def start_kubelet(tools, node, port):
    write_kubelet(node, port)
    (STATE / "podlogs" / node).mkdir(parents=True, exist_ok=True)
    daemons.start(f"kubelet-{node}", [
        tools / "kubelet", f"--config={folder(node)}/kubelet.json", f"--kubeconfig={STATE}/pki/{node}.kubeconfig",
        f"--hostname-override={node}", f"--node-ip={HOST_IP}", f"--root-dir={folder(node)}/kubelet", "--v=2"])


def ctr(node, *arguments):
    return subprocess.run(["ctr", "--address", str(address(node)), "--namespace", "k8s.io", *map(str, arguments)],
                          capture_output=True, text=True, check=False)


def containerd_ready(node):
    return ctr(node, "version").returncode == 0


def import_image(archive):
    """Makes an OCI archive known to both nodes; pods then use it with imagePullPolicy IfNotPresent or Never."""
    for node in NODES:
        out = ctr(node, "images", "import", archive)
        if out.returncode != 0:
            raise RuntimeError(f"import of {archive} on {node}: {out.stderr.strip()}")
