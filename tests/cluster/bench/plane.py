"""A Kubernetes API without a cluster: etcd and kube-apiserver, nothing that acts on objects. For benchmarks and schema tests.

    python3 plane.py KUBECTL_ARGUMENTS...     starts one, runs kubectl (or with `-- COMMAND` a program with KUBECONFIG), ends it

Everything lies in a temporary folder and listens on loopback; nothing is left behind."""
import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent


def tools():
    """Where the programs of the test cluster are; built when they are not there yet."""
    script = HERE.parent / "build_tools.sh"
    where = pathlib.Path(subprocess.run([script, "--where"], check=True, text=True, capture_output=True).stdout.strip())
    if not (where / "kube-apiserver").exists() or not (where / "kubectl").exists():
        subprocess.run([script], check=True, stdout=sys.stderr)
    return where


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Plane:
    def __init__(self, admission_off=("ServiceAccount",)):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="diloco-plane-"))
        self.bin, self.token, self.port = tools(), secrets.token_hex(16), free_port()
        self.admission_off, self.processes = admission_off, []

    def start(self, name, command):
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True)
        self.processes.append(process)
        return process

    def wait(self, what, seconds, url, context=None):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, urllib.error.URLError):
                request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
                with urllib.request.urlopen(request, timeout=2, context=context) as answer:
                    if answer.status == 200:
                        return
            dead = [p for p in self.processes if p.poll() is not None]
            if dead:
                break
            time.sleep(0.1)
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
        raise RuntimeError(f"{what} did not come up within {seconds} s\n{logs}")

    def up(self):
        openssl = shutil.which("openssl") or "openssl"
        key = self.folder / "sa.key"
        subprocess.run([openssl, "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        subprocess.run([openssl, "rsa", "-in", key, "-pubout", "-out", self.folder / "sa.pub"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.start("etcd", ["etcd", "--name", "plane", "--data-dir", self.folder / "etcd", "--unsafe-no-fsync",
                            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"plane={peer}"])
        self.wait("etcd", 30, f"{client}/health")
        certificates = self.folder / "certificates"
        self.apiserver = self.start("apiserver", [
            self.bin / "kube-apiserver", f"--etcd-servers={client}", "--bind-address=127.0.0.1", f"--secure-port={self.port}",
            "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none", f"--cert-dir={certificates}",
            f"--token-auth-file={self.folder}/tokens.csv", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={self.folder}/sa.pub", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", "--profiling=false", "--watch-cache-sizes=pods#20000",
            "--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000",
            f"--disable-admission-plugins={','.join(self.admission_off)}"])
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        self.wait("API server", 120, f"https://127.0.0.1:{self.port}/readyz", unchecked)
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(f"""apiVersion: v1
kind: Config
clusters: [{{name: plane, cluster: {{server: "https://127.0.0.1:{self.port}", certificate-authority: {certificates}/apiserver.crt}}}}]
users: [{{name: admin, user: {{token: {self.token}}}}}]
contexts: [{{name: plane, context: {{cluster: plane, user: admin}}}}]
current-context: plane
""")
        return self

    def kubectl(self, *arguments, text=None):
        return subprocess.run([self.bin / "kubectl", "--kubeconfig", self.kubeconfig, *arguments], input=text, text=True,
                              check=True, capture_output=True, timeout=120).stdout

    def environment(self):
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def down(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        try:
            return self.up()
        except BaseException:
            self.down()
            raise

    def __exit__(self, *_):
        self.down()


def main(arguments):
    with Plane() as plane:
        command = arguments[1:] if arguments[:1] == ["--"] else [str(plane.bin / "kubectl"), *arguments]
        return subprocess.run(command, env=plane.environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
