"""Certificates and kubeconfig files of the test cluster."""
import subprocess

from lib.settings import API_SERVICE_IP, HOST_IP, NODES, STATE

PKI = STATE / "pki"


def openssl(*arguments, text=None):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, input=text, text=True)


def certificate(name, common_name, organisation, alternative=""):
    key, request, out, extensions = (PKI / f"{name}{end}" for end in (".key", ".csr", ".crt", ".ext"))
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
            "-subj", f"/O={organisation}/CN={common_name}", "-out", request)
    lines = ["keyUsage=digitalSignature,keyEncipherment", "extendedKeyUsage=serverAuth,clientAuth"]
    if alternative:
        lines.append(f"subjectAltName={alternative}")
    extensions.write_text("\n".join(lines) + "\n")
    openssl("x509", "-req", "-in", request, "-CA", PKI / "ca.crt", "-CAkey", PKI / "ca.key", "-CAcreateserial", "-days", "365",
            "-out", out, "-extfile", extensions)


def kubeconfig(name, port):
    (PKI / f"{name}.kubeconfig").write_text(
        "apiVersion: v1\nkind: Config\n"
        f'clusters: [{{name: diloco-test, cluster: {{server: "https://{HOST_IP}:{port}", certificate-authority: {PKI}/ca.crt}}}}]\n'
        f"users: [{{name: {name}, user: {{client-certificate: {PKI}/{name}.crt, client-key: {PKI}/{name}.key}}}}]\n"
        f"contexts: [{{name: diloco-test, context: {{cluster: diloco-test, user: {name}}}}}]\n"
        "current-context: diloco-test\n")


def make(port):
    """All certificates and kubeconfigs for an API server at `port` of the bridge."""
    PKI.mkdir(parents=True, exist_ok=True)
    PKI.chmod(0o700)
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", PKI / "ca.key",
            "-out", PKI / "ca.crt", "-subj", "/CN=diloco-test-ca", "-days", "365",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
    openssl("genrsa", "-out", PKI / "sa.key", "2048")
    openssl("rsa", "-in", PKI / "sa.key", "-pubout", "-out", PKI / "sa.pub")
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    certificate("apiserver", "kube-apiserver", "kubernetes",
                ",".join([*(f"DNS:{name}" for name in names), f"IP:{HOST_IP}", f"IP:{API_SERVICE_IP}"]))
    certificate("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters")
    certificate("front", "front-proxy", "kubernetes")
    certificate("admin", "admin", "system:masters")
    certificate("controllers", "system:kube-controller-manager", "kubernetes")
    certificate("scheduler", "system:kube-scheduler", "kubernetes")
    certificate("proxy", "system:kube-proxy", "kubernetes")
    for node in NODES:
        certificate(node, f"system:node:{node}", "system:nodes", f"DNS:{node},IP:{HOST_IP}")
    for name in ("admin", "controllers", "scheduler", "proxy", *NODES):
        kubeconfig(name, port)
