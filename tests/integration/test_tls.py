#!/usr/bin/env python3
"""The syncer over TLS 1.3: the same protocol, client certificates, health probes on a plain port."""
import pathlib
import ssl
import subprocess
import sys
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import client as c  # noqa: E402
from client import Client, Learner, drive  # noqa: E402
from ensemble import Ensemble, Failure, check, main, manifest  # noqa: E402

ROWS = 2048  # 2 MiB a fragment: several chunks.


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder, name):
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", cert,
            "-days", 2, "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE")
    return key, cert


def certificate(folder, name, issuer, extension):
    key, request, cert = (folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
    (folder / f"{name}.ext").write_text(extension + "\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", request, "-subj",
            f"/CN={name}")
    openssl("x509", "-req", "-in", request, "-CA", issuer[1], "-CAkey", issuer[0], "-CAcreateserial", "-days", 2, "-out", cert,
            "-extfile", folder / f"{name}.ext")
    return key, cert


def job():
    return manifest("/dev/null", "test", training={"tokenBudget": 10**9}, sync={
        "fragments": 2, "interval": 2, "overlap": 1, "quorum": 1, "grace": {"mode": "none"}, "compression": "int8",
        "outerOptimizer": {"type": "sgd", "learningRate": "1"}})


def learner(e, tls):
    return Learner(e.addresses[0], e.token, "test", [("a", [ROWS, 256]), ("b", [ROWS, 256])], tls=tls,
                   delta=lambda fragment: c.int8_blocks([0.5] * 256) * ROWS,
                   seed=lambda fragment: c.floats([float(fragment)] * 256) * ROWS)


def start(e, mutual):
    ca = authority(e.folder, "ca")
    server = certificate(e.folder, "syncer", ca, "subjectAltName=IP:127.0.0.1")
    extra = ["--tls-cert", server[1], "--tls-key", server[0], "--health-listen", "127.0.0.1:0"]
    if mutual:
        extra += ["--tls-ca", ca[1]]
    e.start_syncer(extra=extra)
    e.wait(lambda: "listening" in e.log("syncer-0"), 5, "the log")
    fields = dict(part.split("=", 1) for part in e.log("syncer-0").split("listening ", 1)[1].split("\n")[0].split())
    check(fields["tls"] == "1.3", f"{fields}")
    e.health = fields["health"]
    return ca


def get(e, path):
    with urllib.request.urlopen(f"http://{e.health}{path}", timeout=5) as answer:
        return answer.read().decode()


def expect_failure(act, what):
    try:
        act()
    except (OSError, c.Denied, c.Closed):
        return
    raise Failure(what)


def rounds(e, one):
    drive([one], lambda: one.has_all() and min(one.versions.values()) >= 3, 30, "rounds over TLS")
    check(abs(c.struct.unpack_from("<f", one.values[1]["data"])[0] - (1 - 0.5 * (one.values[1]["version"] - 1))) < 1e-4,
          "and they merge")


def test_rounds_over_tls(build):
    """T4: probes answer in plain HTTP while learners speak TLS."""
    with Ensemble(build, job()) as e:
        ca = start(e, mutual=False)
        rounds(e, learner(e, c.client_tls(ca[1])))
        check(get(e, "/healthz") == "ok\n" and get(e, "/readyz") == "ready\n", "health probes need no TLS")
        check("diloco_rounds_merged_total" in get(e, "/metrics"), "nor do metrics")
        with urllib.request.urlopen(f"https://{e.addresses[0]}/healthz", context=c.client_tls(ca[1]), timeout=5) as answer:
            check(answer.status == 200, "HTTP over TLS too")
        old = c.client_tls(ca[1])
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        expect_failure(lambda: Client(e.addresses[0], e.token, tls=old), "TLS 1.2 was accepted")
        expect_failure(lambda: Client(e.addresses[0], e.token), "plain text was accepted on the TLS port")
        expect_failure(lambda: Client(e.health, e.token), "a WebSocket was accepted on the health port")
        other = authority(e.folder, "other")
        expect_failure(lambda: Client(e.addresses[0], e.token, tls=c.client_tls(other[1])), "the certificate is not checked")


def test_client_certificates(build):
    with Ensemble(build, job()) as e:
        ca = start(e, mutual=True)
        mine = certificate(e.folder, "learner", ca, "extendedKeyUsage=clientAuth")
        other = authority(e.folder, "other")
        foreign = certificate(e.folder, "foreign", other, "extendedKeyUsage=clientAuth")
        expect_failure(lambda: Client(e.addresses[0], e.token, tls=c.client_tls(ca[1])), "no certificate was accepted")
        expect_failure(lambda: Client(e.addresses[0], e.token, tls=c.client_tls(ca[1], foreign[1], foreign[0])),
                       "a certificate of another authority was accepted")
        expect_failure(lambda: Client(e.addresses[0], "wrong", tls=c.client_tls(ca[1], mine[1], mine[0])),
                       "a certificate does not stand in for the token")
        rounds(e, learner(e, c.client_tls(ca[1], mine[1], mine[0])))
        check(get(e, "/readyz") == "ready\n", "health probes show no certificate")


if __name__ == "__main__":
    main([test_rounds_over_tls, test_client_certificates])
