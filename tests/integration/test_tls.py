#!/usr/bin/env python3
"""TLS 1.3: the syncer's protocol, client certificates, health probes on a plain port; and `diloco run --tls`."""
import pathlib
import ssl
import subprocess
import sys
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import client as c  # noqa: E402
from client import Client, Learner, drive  # noqa: E402
from ensemble import TEXT, Ensemble, Failure, check, main, manifest  # noqa: E402
from test_resume import resume  # noqa: E402
from test_run import ENDLESS, PACED, Run, wait  # noqa: E402

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


def speaks_only_tls(run):
    """The run's syncer, asked from outside; and its certificate is checked."""
    address = wait((run.dir / "ports/shard-0").read_text, 20, "the port").strip()
    ca = run.dir / "tls/ca.pem"
    strict = ssl.create_default_context(cafile=ca)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    strict.minimum_version = ssl.TLSVersion.TLSv1_3
    for host in (address, "localhost:" + address.rsplit(":", 1)[1]):
        with urllib.request.urlopen(f"https://{host}/healthz", context=strict, timeout=5) as answer:
            check(answer.read() == b"ok\n", f"{host} over TLS")
    for url, context in ((f"http://{address}/healthz", None), (f"https://{address}/healthz", ssl.create_default_context())):
        try:
            urllib.request.urlopen(url, context=context, timeout=5).close()
        except OSError:  # urllib's errors are of this kind, too.
            continue
        raise Failure(f"{url} was answered without the run's authority")
    check("learners" in run.ask("status", f"https://{address}", "--tls-ca", str(ca)), "status of a URL")
    check("no syncer answers" in run.ask("status", f"https://{address}", code=1), "nor does status trust just anyone")


def test_run_over_tls(build):
    """T4: certificates of the run's own; kills, recovery from a peer, a checkpoint and a resume as without TLS."""
    job = manifest(TEXT, syncer={"shards": 2}, learners={"replicas": 3}, **ENDLESS)
    with Run(build, job, [*PACED, "--tls"]) as run:
        run.training(3)
        speaks_only_tls(run)
        for name in ("syncer", "worker"):
            check((run.dir / f"tls/{name}.key").stat().st_mode & 0o777 == 0o600, "others may read a key")
            openssl("verify", "-x509_strict", "-CAfile", run.dir / "tls/ca.pem", run.dir / f"tls/{name}.pem")
        check(not (run.dir / "tls/ca.key").exists(), "the authority's key is left behind")
        check("tls=1.3" in (run.dir / "logs/syncer-1.log").read_text(), "a shard speaks no TLS")
        run.ask("kill", "run", "learner", "1")
        wait(lambda: run.has_event("took over the state of learner", "learner-1"), 40, "recovery from a peer over TLS")
        check(run.ask("checkpoint", "run").startswith("checkpoint"), "no checkpoint")
        before = (run.dir / "tls/ca.pem").read_bytes()
        merged = run.status()["round"]
        run.process.kill()
        wait(lambda: not run.pids(), 10, "the end of all processes")
        resume(run, *PACED)  # As it was begun: nobody has to say --tls again.
        wait(lambda: run.status()["round"] > merged, 60, "rounds after the resume")
        check((run.dir / "tls/ca.pem").read_bytes() == before, "another authority after the resume")
        speaks_only_tls(run)
        run.ask("stop", "run")
        run.exit(60)


if __name__ == "__main__":
    main([test_rounds_over_tls, test_client_certificates, test_run_over_tls])
