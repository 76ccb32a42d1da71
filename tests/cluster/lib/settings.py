"""Where the test cluster lives and what it is called. One cluster a machine."""
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent

# Short: paths of sockets below it may have 107 bytes.
STATE = pathlib.Path(os.environ.get("DILOCO_CLUSTER_DIR", "/var/lib/diloco-cluster"))

BRIDGE = "diloco0"
POD_CIDR = "10.247.0.0/16"
HOST_IP = "10.247.0.1"  # The bridge's address: the API server, the kubelets and what the tests serve listen there and only there.
SERVICE_CIDR = "10.248.0.0/16"
API_SERVICE_IP = "10.248.0.1"
DNS_IP = "10.248.0.10"
NODES = ("node-a", "node-b")  # node-a keeps the cluster DNS; node-b is the one that tests stop.
CGROUP = "diloco-cluster"  # All processes, daemons and pods alike, are in this cgroup: what is in it is ours to end.
STORAGE_CLASS = "diloco-test"
VOLUMES = 60  # Directories of this machine, offered as PersistentVolumes that any uid may write to.
VOLUMES_DIR = STATE / "volumes"
KUBECONFIG = STATE / "pki" / "admin.kubeconfig"


def tools():
    """Folder of kube-apiserver, kubectl, helm, ... as build_tools.sh builds them."""
    out = subprocess.run([HERE / "build_tools.sh", "--where"], capture_output=True, text=True, check=True)
    return pathlib.Path(out.stdout.strip())


def say(text):
    print(f"cluster: {text}", flush=True)


def fail(text):
    sys.exit(f"cluster: {text}")
