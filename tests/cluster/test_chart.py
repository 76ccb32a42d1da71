#!/usr/bin/env python3
"""The chart against Helm and the real API server: what is kept equals what is rendered, wrong values are refused by name, every
rendering is taken under Pod Security "restricted", and the operator gets the rights that it needs and no others (K11).

    test_chart.py                                        with KUBECONFIG set, kubectl and helm in PATH
    bench/plane.py -- tests/cluster/test_chart.py        the same without a cluster"""
import json
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "diloco"
SPACE, OTHER = "diloco-chart-test", "diloco-chart-other"
NAME = "chart-test"
FAULTS = []


def expect(holds, text):
    if not holds:
        FAULTS.append(text)


def run(*command, text=None):
    return subprocess.run([str(word) for word in command], input=text, text=True, capture_output=True, check=False, timeout=120)


def must(*command, text=None):
    done = run(*command, text=text)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def render(*arguments, release=NAME, space=SPACE):
    return must("helm", "template", release, CHART, "--namespace", space, "--kube-version", "1.36.0", *arguments)


def kinds(text):
    return re.findall(r"^kind: (\S+)$", text, re.M)


def kept_files():
    plain = render("--set", "plainManifests=true", release="diloco", space="diloco-system")
    expect(plain == (ROOT / "helm" / "install.yaml").read_text(encoding="utf-8"), "helm/install.yaml is stale: make manifests")
    expect("Helm" not in plain and "helm.sh" not in plain, "helm/install.yaml speaks of Helm")
    crd = (ROOT / "crds" / "decoupleddilocojobs.yaml").read_text(encoding="utf-8")
    expect(crd == (CHART / "files" / "decoupleddilocojobs.yaml").read_text(encoding="utf-8"), "the chart's CRD is stale: make manifests")
    rules = crd.split("spec:\n  group:", 1)[1]
    expect(rules.strip() in plain, "helm/install.yaml has another CRD")
    version = re.search(r'^#define DILOCO_VERSION "(.*)"', (ROOT / "worker/link/diloco.h").read_text(encoding="utf-8"), re.M).group(1)
    expect(f'appVersion: "{version}"' in (CHART / "Chart.yaml").read_text(encoding="utf-8"), f"Chart.yaml: appVersion is not {version}")
    lint = run("helm", "lint", "--strict", CHART)
    expect(lint.returncode == 0, f"helm lint: {lint.stdout}")


REFUSED = {  # Values, and what the refusal must name.
    "replica=1": "replica",
    "replicas=many": "replicas",
    "replicas=9": "replicas",
    "replicas=2,leaderElection=false": "leaderElection",
    "images.pullPolicy=Sometimes": "pullPolicy",
    "images.operator.digest=abc": "digest",
    "images.tag=a b": "tag",
    "watchNamespaces={A_b}": "watchNamespaces",
    "operator.logLevel=loud": "logLevel",
    "operator.qps=0": "qps",
    "operator.statusVia=mail": "statusVia",
    "metrics.port=80": "port",
    "metrics.service.enabled=false,metrics.serviceMonitor.enabled=true": "serviceMonitor",
    "metrics.serviceMonitor.interval=soon": "interval",
    "crds.instal=true": "instal",
}


def wrong_values():
    for values, name in REFUSED.items():
        done = run("helm", "template", NAME, CHART, "--kube-version", "1.36.0", "--set", values)
        expect(done.returncode != 0 and name in done.stderr, f"--set {values}: {done.stderr.strip() or 'is taken'}")


def named_by_rules(rendered):
    """Alerts are about metrics that the programs have."""
    names = set(re.findall(r"\b((?:diloco|leader_election)_\w+)", " ".join(re.findall(r"expr: (.*)", rendered))))
    names -= {"diloco_job"}
    sources = " ".join(path.read_text(encoding="utf-8") for folder in ("operator", "syncer") for path in (ROOT / folder).rglob("*.c"))
    for name in sorted(names):
        expect(f'"{name}"' in sources, f"an alert is about {name}, which no program has")
    expect(len(names) >= 5, f"alerts about {names} only")


def gates():
    """What values switch on and off."""
    whole = kinds(render())
    expect("ServiceMonitor" not in whole and "Namespace" not in whole, f"more than is asked for: {whole}")
    for kind in ("Deployment", "PodDisruptionBudget", "Service", "CustomResourceDefinition", "PriorityClass", "ClusterRole"):
        expect(kind in whole, f"no {kind} by default")
    for values, kind in {"crds.install=false": "CustomResourceDefinition", "podDisruptionBudget.enabled=false": "PodDisruptionBudget",
                         "replicas=1": "PodDisruptionBudget", "metrics.service.enabled=false": "Service",
                         "priorityClass.create=false": "PriorityClass", "serviceAccount.create=false": "ServiceAccount"}.items():
        expect(kind not in kinds(render("--set", values)), f"{values} still makes a {kind}")
    expect("ServiceMonitor" in kinds(render("--set", "metrics.serviceMonitor.enabled=true")), "no ServiceMonitor when it is asked for")
    watched = render("--set", "metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true")
    expect({"PodMonitor", "PrometheusRule"} <= set(kinds(watched)), "no PodMonitor, no PrometheusRule when they are asked for")
    expect(not {"PodMonitor", "PrometheusRule"} & set(whole), "PodMonitor or PrometheusRule without being asked for")
    named_by_rules(watched)
    expect("resource-policy: keep" in render() and "resource-policy" not in render("--set", "crds.keep=false"), "crds.keep")
    local = render("--set", f"watchNamespaces={{{SPACE}}},rbac.nodes=false,rbac.aggregate=false,crds.install=false,"
                            "priorityClass.create=false")
    expect(not {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "PriorityClass"} & set(kinds(local)),
           f"cluster-wide objects in a limited installation: {kinds(local)}")
    expect(f"--namespaces={SPACE}" in local, "the operator is not told its namespaces")
    named = render("--set", "images.registry=registry.example.com/ml,images.tag=7")
    for program in ("operator", "syncer", "worker"):
        expect(f"registry.example.com/ml/diloco-{program}:7" in named, f"image of the {program}")
    expect("diloco-operator@sha256:" + "0" * 64 in render("--set", "images.operator.digest=sha256:" + "0" * 64), "digest")


def taken_by_the_server():
    """Strict validation, and Pod Security's warnings, of every form."""
    for registry, is_warned in (("", True), ("registry.example.com/ml", False)):
        shown = must("helm", "install", NAME, CHART, "--dry-run=client", "-n", SPACE, "--set",
                     f"images.registry={registry},crds.install=false,priorityClass.create=false")
        expect(("ErrImagePull" in shown.split("NOTES:")[1]) == is_warned, f"notes on images with registry '{registry}'")
    for values in ("replicas=2", "replicas=1,leaderElection=false", f"watchNamespaces={{{SPACE},{OTHER}}}", "operator.statusVia=proxy"):
        done = run("kubectl", "apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-", text=render("--set", values))
        expect(done.returncode == 0, f"{values}: {done.stderr.strip()}")
        expect("would violate" not in done.stderr, f"{values}: {done.stderr.strip()}")
        expect("deployment.apps/chart-test-diloco-operator" in done.stdout, f"{values}: {done.stdout}")


ALLOWED = ["create secrets", "list pods", "watch pods", "delete pods", "create pods", "watch statefulsets.apps",
           "patch statefulsets.apps", "create persistentvolumeclaims", "patch services", "patch configmaps",
           "create networkpolicies.networking.k8s.io", "create poddisruptionbudgets.policy", "create events.events.k8s.io",
           "patch decoupleddilocojobs.diloco.dev/status", "delete decoupleddilocojobs.diloco.dev"]
FORBIDDEN = ["get secrets", "list secrets", "watch secrets", "patch secrets", "update secrets", "delete secrets", "create pods/exec",
             "get pods/proxy", "create deployments.apps", "delete persistentvolumeclaims", "create serviceaccounts/token",
             "create clusterroles.rbac.authorization.k8s.io", "patch nodes", "delete nodes", "impersonate users"]


def may(account, what, *where):
    verb, resource = what.split(" ")
    resource, _, below = resource.partition("/")
    arguments = [verb, resource] + ([f"--subresource={below}"] if below else [])
    answer = run("kubectl", "auth", "can-i", *arguments, f"--as=system:serviceaccount:{SPACE}:{account}", *where)
    if answer.stdout.strip() not in ("yes", "no"):
        raise AssertionError(f"can-i {what}: {answer.stderr}")
    return answer.stdout.strip() == "yes"


def rights():
    account = f"{NAME}-diloco-operator"
    parts = ("--show-only", "templates/rbac.yaml", "--show-only", "templates/serviceaccount.yaml")
    for values, spaces, elsewhere in (("replicas=2", ["default", SPACE], True),
                                      (f"watchNamespaces={{{SPACE}}},rbac.nodes=false,rbac.aggregate=false", [SPACE], False)):
        text = render("--set", values, *parts)
        must("kubectl", "apply", "-f", "-", text=text)
        try:
            for space in spaces:
                for what in ALLOWED:
                    expect(may(account, what, "-n", space), f"{values}: may not {what} in {space}")
                for what in FORBIDDEN:
                    expect(not may(account, what, "-n", space), f"{values}: may {what} in {space}")
            expect(may(account, "list pods", "-n", OTHER) == elsewhere, f"{values}: rights in another namespace")
            expect(may(account, "list nodes") == elsewhere, f"{values}: rights to read nodes")
            named = run("kubectl", "auth", "can-i", "get", f"secrets/{account}-key", "-n", SPACE,
                        f"--as=system:serviceaccount:{SPACE}:{account}")
            expect(named.stdout.strip() == "yes", f"{values}: may not read the key of tokens")
            expect(not may(account, "update leases.coordination.k8s.io", "-n", SPACE),
                   f"{values}: may update any lease")
        finally:
            must("kubectl", "delete", "-f", "-", "--wait=false", text=text)


def state_over_releases():
    """The key of tokens is the same after an upgrade, and after an uninstall that keeps the jobs; else it goes."""
    def helm(command, *values):
        return must("helm", command, NAME, CHART, "-n", SPACE, "--set", "replicas=0,crds.install=false,priorityClass.create=false", *values)

    def key():
        done = run("kubectl", "get", "secret", f"{NAME}-diloco-operator-key", "-n", SPACE, "-o", "jsonpath={.data.key}")
        return done.stdout if done.returncode == 0 else None

    try:
        notes = helm("install").split("NOTES:", 1)[1]
        manifest = re.search(r"<<'JOB'\n(.*?)\n    JOB", notes, re.S).group(1)
        taken = run("kubectl", "apply", "--dry-run=server", "-n", SPACE, "-f", "-", text=textwrap.dedent(manifest))
        expect(taken.returncode == 0, f"the first job of NOTES.txt: {taken.stderr.strip()}")
        first = key()
        expect(first is not None and len(first) == 44, f"no key of 32 bytes: {first}")
        helm("upgrade", "--set", "operator.qps=60")
        expect(key() == first, "an upgrade changes the key")
        must("helm", "uninstall", NAME, "-n", SPACE)
        expect(key() == first, "the key is gone though jobs are kept")
        helm("install", "--set", "crds.keep=false")
        expect(key() == first, "another installation does not find the key")
        must("helm", "uninstall", NAME, "-n", SPACE)
        left = must("kubectl", "get", "secrets,leases,deployments,services,roles,serviceaccounts", "-n", SPACE, "-o", "name")
        expect(NAME not in left, f"left behind: {left}")
    finally:
        run("helm", "uninstall", NAME, "-n", SPACE)


CRD = "crd/decoupleddilocojobs.diloco.dev"


def main():
    is_there = run("kubectl", "get", CRD).returncode == 0  # Of a chart that is installed; it stays.
    if not is_there:
        must("kubectl", "apply", "--server-side", "-f", ROOT / "crds" / "decoupleddilocojobs.yaml")
    for what in ("jsonpath={.status.acceptedNames.kind}=DecoupledDiLoCoJob", "condition=Established"):
        must("kubectl", "wait", f"--for={what}", "--timeout=30s", CRD)  # At first there are no conditions, which is an error.
    for space in (SPACE, OTHER):
        must("kubectl", "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": space, "labels": {"pod-security.kubernetes.io/warn": "restricted"}}}))
    try:
        kept_files()
        wrong_values()
        gates()
        taken_by_the_server()
        rights()
        state_over_releases()
    finally:
        must("kubectl", "delete", "namespace", SPACE, OTHER, "--wait=false")
        if not is_there:
            must("kubectl", "delete", CRD, "--timeout=60s")
    for fault in FAULTS:
        print(fault)
    print(f"chart: {len(REFUSED)} wrong values, {len(ALLOWED)} rights given and {len(FORBIDDEN)} not, {len(FAULTS)} faults")
    return 1 if FAULTS else 0


if __name__ == "__main__":
    sys.exit(main())
