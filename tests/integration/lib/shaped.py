"""A link of a given speed between this process and another network namespace, in namespaces of our own: nothing of the machine is
touched, and no privilege is needed where unprivileged user namespaces are allowed.

    enter()                          at the start of the program: goes on in namespaces of its own
    with Link("1gbit") as link:
        link.run([...])              Popen in the far namespace; it reaches this one at link.near
"""
import os
import subprocess
import sys

MARK = "DILOCO_SHAPED"


def enter():
    """Executes this program again in namespaces of its own, once."""
    if os.environ.get(MARK):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    os.environ[MARK] = "1"
    command = ["unshare", "--net", "--mount", *root, "--", sys.executable, *sys.argv]
    os.execvp(command[0], command)


class Link:
    near, far = "10.77.0.1", "10.77.0.2"

    def __init__(self, rate, burst="128kb", latency="30ms"):
        self.rate, self.burst, self.latency = rate, burst, latency

    def __enter__(self):
        shape = ["tbf", "rate", self.rate, "burst", self.burst, "latency", self.latency]
        for command in (
                ["ip", "netns", "add", "far"],
                ["ip", "link", "add", "near0", "type", "veth", "peer", "name", "far0"],
                ["ip", "link", "set", "far0", "netns", "far"],
                ["ip", "addr", "add", self.near + "/24", "dev", "near0"],
                ["ip", "link", "set", "near0", "up"],
                ["ip", "netns", "exec", "far", "ip", "addr", "add", self.far + "/24", "dev", "far0"],
                ["ip", "netns", "exec", "far", "ip", "link", "set", "far0", "up"],
                ["ip", "netns", "exec", "far", "ip", "link", "set", "lo", "up"],
                ["tc", "qdisc", "add", "dev", "near0", "root", *shape],
                ["ip", "netns", "exec", "far", "tc", "qdisc", "add", "dev", "far0", "root", *shape]):
            subprocess.run(command, check=True)
        return self

    def __exit__(self, *_):
        subprocess.run(["ip", "netns", "del", "far"], check=False)

    def run(self, arguments, **options):
        return subprocess.Popen(["ip", "netns", "exec", "far", *map(str, arguments)], **options)
