"""A metric for autoscalers: the API external.metrics.k8s.io, served by the test itself on the bridge's address.

A HorizontalPodAutoscaler needs a source of metrics; users have one of several adapters, which are not ours to test.
"""
import http.server
import json
import ssl
import subprocess
import tempfile
import threading
import time

from lib.kube import apply, kubectl, wait
from lib.settings import HOST_IP

GROUP = "external.metrics.k8s.io"
NAMESPACE = "kube-system"


class Metric:
    """`with Metric() as metric: metric.value = 3` makes every external metric read 3."""

    def __init__(self):
        self.value = 0
        self.folder = tempfile.TemporaryDirectory()

    def reply(self, path):
        if path.rstrip("/").endswith(f"/apis/{GROUP}/v1beta1"):
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/v1beta1", "resources": [
                {"name": "wanted", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}]}
        return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/v1beta1", "metadata": {}, "items": [
            {"metricName": "wanted", "metricLabels": {}, "value": str(self.value),
             "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}]}

    def __enter__(self):
        metric = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps(metric.reply(self.path.split("?")[0])).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        key, certificate = f"{self.folder.name}/key.pem", f"{self.folder.name}/cert.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
                        "-out", certificate, "-days", "2", "-subj", "/CN=metric"], check=True, capture_output=True)
        self.server = http.server.ThreadingHTTPServer((HOST_IP, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.publish(self.server.server_address[1])
        return self

    def publish(self, port):
        apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "test-metric", "namespace": NAMESPACE},
               "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]}})
        apply({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
               "metadata": {"name": "test-metric", "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": "test-metric"}},
               "endpoints": [{"addresses": [HOST_IP], "conditions": {"ready": True}}],
               "ports": [{"name": "https", "port": port, "protocol": "TCP"}]})
        apply({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"v1beta1.{GROUP}"},
               "spec": {"group": GROUP, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
                        "insecureSkipTLSVerify": True, "service": {"name": "test-metric", "namespace": NAMESPACE, "port": 443}}})
        wait("the metric is served", 60, lambda: "True" in kubectl(
            "get", "apiservice", f"v1beta1.{GROUP}", "-o",
            "jsonpath={.status.conditions[?(@.type=='Available')].status}").stdout)

    def __exit__(self, *_):
        kubectl("delete", "apiservice", f"v1beta1.{GROUP}", "--ignore-not-found")
        kubectl("-n", NAMESPACE, "delete", "service/test-metric", "endpointslice/test-metric", "--ignore-not-found")
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()
