#!/usr/bin/env python3
"""`make demo-cluster`: a Kubernetes of two nodes on this machine, the chart, and a sample job that trains. Stays up afterwards.

demo.py --build build/release
"""
import argparse
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
os.environ["DILOCO_IMAGE_TAG"] = "dev"
from lib import cluster, kube, nodes  # noqa: E402
from lib.settings import KUBECONFIG, ROOT, VOLUMES_DIR, fail, say  # noqa: E402

NAMESPACE = "demo"
SAMPLE = ROOT / "crds" / "samples" / "kubernetes.yaml"
DEMO_SECONDS = 1200
AROUND = """
Look around:
  eval "$(tests/cluster/cluster.py env)"          # KUBECONFIG, kubectl and helm for this shell
  kubectl get ddj,pods -A                         # jobs and pods
  kubectl -n demo describe ddj {job}              # conditions and events
  kubectl -n demo logs -f {job}-syncer-0          # rounds as they are merged
  kubectl -n demo scale ddj {job} --replicas 3    # one more learner (while it trains)
  kubectl -n demo delete pod -l diloco.dev/role=learner    # and nothing stops
  kubectl -n demo port-forward {job}-syncer-0 7000 &  curl localhost:7000/status
Take it down, leaving nothing behind:
  tests/cluster/cluster.py down
"""


def wait_for_end(job):
    """Prints the job's line whenever it has changed; its phase at the end."""
    deadline = time.monotonic() + DEMO_SECONDS
    last = None
    while time.monotonic() < deadline:
        out = kube.kubectl("-n", NAMESPACE, "get", "ddj", job).stdout.splitlines()
        line = out[-1].rsplit(None, 1)[0]  # Without the age.
        if last is None:
            print(out[0])
        if line != last:
            print(out[-1], flush=True)
            last = line
        phase = json.loads(kube.kubectl("-n", NAMESPACE, "get", "ddj", job, "-o", "json").stdout).get("status", {}).get("phase")
        if phase in ("Succeeded", "Failed"):
            return phase
        time.sleep(2)
    fail(f"job {job} has not ended within {DEMO_SECONDS} s")


def weights(job):
    """Where the exported weights lie on this machine."""
    claim = json.loads(kube.kubectl("-n", NAMESPACE, "get", "pvc", f"{job}-output", "-o", "json").stdout)
    return VOLUMES_DIR / claim["spec"]["volumeName"].rsplit("-", 1)[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    build = pathlib.Path(parser.parse_args().build)
    with cluster.tests_locked():
        return demonstrate(build)


def demonstrate(build):
    cluster.up()
    os.environ["KUBECONFIG"] = str(KUBECONFIG)
    for name in ("diloco-operator", "diloco-syncer", "diloco-worker"):
        nodes.import_image(build / "images" / f"{name}.tar")
    say("installing the chart: helm upgrade --install diloco helm/diloco -n diloco-system")
    kube.Release("diloco", "diloco-system").install()
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "text", "namespace": NAMESPACE},
                "data": {"text.txt": kube.real_text(900)}})
    say(f"applying {SAMPLE.relative_to(ROOT)} in namespace {NAMESPACE}")
    kube.kubectl("-n", NAMESPACE, "delete", "ddj", "--all", "--timeout=60s")
    job = kube.kubectl("-n", NAMESPACE, "create", "-f", SAMPLE, "-o", "name").stdout.strip().split("/")[-1]
    print(AROUND.format(job=job), flush=True)
    phase = wait_for_end(job)
    if phase == "Succeeded":
        say(f"{job}: {phase}; weights in {weights(job)}")
    else:
        print(kube.kubectl("-n", NAMESPACE, "describe", "ddj", job).stdout)
    say("still up; `tests/cluster/cluster.py down` takes it down")
    return 0 if phase == "Succeeded" else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
