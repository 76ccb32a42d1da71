#!/usr/bin/env python3
"""Builds the container images of the programs as OCI archives, without a container engine, registry or network.

    images/build_oci.py --build build/release [--prefix localhost] [--tag dev] [--out build/release/images]

For each of diloco-operator, diloco-syncer and diloco-worker that BUILD/bin holds, OUT/<program>.tar is an OCI image layout:
one layer with the shared libraries that all of them need (found by `ldd` on this machine, which therefore has to be of the same
kind as the programs), one layer with the program. `ctr images import`, `podman load`, `skopeo copy oci-archive:` and `crane
push` take it. The image runs as uid 65532 with a read-only root. Equal inputs give equal bytes.

    images/build_oci.py --single OUT.tar NAME:TAG PATH=FILE... -- ENTRYPOINT...    an image of given files, for tests

Standard library only.
"""
import argparse
import gzip
import hashlib
import io
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tarfile

PROGRAMS = ("diloco-operator", "diloco-syncer", "diloco-worker")
UID = 65532
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
FILES = {  # What a small C program expects of a root file system.
    "etc/passwd": f"root:x:0:0:root:/:/sbin/nologin\ndiloco:x:{UID}:{UID}:diloco:/:/sbin/nologin\n",
    "etc/group": f"root:x:0:\ndiloco:x:{UID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
SANITIZER_ENVIRONMENT = (
    "ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:exitcode=99",  # The leak check needs ptrace, which a container may lack.
    "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1",
)


def fail(message):
    sys.exit(f"build_oci: {message}")


def libraries(program):
    """Paths of the shared libraries that `program` loads, the loader included, as the program names them."""
    out = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    if out.returncode != 0:
        if "not a dynamic executable" in out.stdout + out.stderr or "statically linked" in out.stdout:
            return set()
        fail(f"ldd {program}: {out.stderr.strip()}")
    found = set()
    for line in out.stdout.splitlines():
        if "not found" in line:
            fail(f"{program} needs a library that this machine does not have:{line}")
        match = re.search(r"(?:=> )?(/\S+) \(0x", line)
        if match:
            found.add(match.group(1))
    return found


class Layer:
    """A tar of files, sorted, without times or owners of this machine."""

    def __init__(self):
        self.entries = {}

    def text(self, path, content, mode=0o644):
        self.entries[path.strip("/")] = (mode, content.encode())

    def file(self, path, source, mode=0o755):
        self.entries[path.strip("/")] = (mode, pathlib.Path(source).read_bytes())

    def folder(self, path, mode=0o755):
        self.entries[path.strip("/")] = (mode, None)

    def tar(self):
        for path in list(self.entries):
            for parent in list(pathlib.PurePosixPath(path).parents)[:-1]:
                self.entries.setdefault(str(parent), (0o755, None))
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(self.entries):
                mode, content = self.entries[path]
                info = tarfile.TarInfo(path)
                info.mode, info.mtime, info.uid, info.gid = mode, 0, 0, 0
                if content is None:
                    info.type = tarfile.DIRTYPE
                    archive.addfile(info)
                else:
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        return out.getvalue()


class Packed:
    """A layer as it is stored: compressed once, shared by the images that use it."""

    def __init__(self, layer, comment):
        raw = layer.tar()
        self.diff_id = "sha256:" + hashlib.sha256(raw).hexdigest()
        self.blob = gzip.compress(raw, compresslevel=6, mtime=0)
        self.comment = comment


def write_image(out, reference, layers, entrypoint, environment=(), user=f"{UID}:{UID}", title=None):
    blobs = {}

    def put(data, media_type):
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": media_type, "digest": "sha256:" + digest, "size": len(data)}

    def put_json(value, media_type):
        return put(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), media_type)

    machine = platform.machine()
    config = {
        "architecture": ARCHITECTURES.get(machine, machine), "os": "linux",
        "config": {"User": user, "Entrypoint": list(entrypoint), "Env": ["PATH=/usr/bin:/bin", *environment], "WorkingDir": "/",
                   "Labels": {"org.opencontainers.image.title": title or reference}},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created_by": "build_oci", "comment": layer.comment} for layer in layers],
    }
    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": put_json(config, CONFIG_TYPE),
        "layers": [put(layer.blob, LAYER_TYPE) for layer in layers],
    }
    described = put_json(manifest, MANIFEST_TYPE)
    described["annotations"] = {"io.containerd.image.name": reference,
                                "org.opencontainers.image.ref.name": reference.rsplit(":", 1)[1]}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [described]}
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    with tarfile.open(partial, "w") as archive:
        def add(name, data):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o644, 0
            archive.addfile(info, io.BytesIO(data))
        add("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        add("index.json", json.dumps(index, sort_keys=True).encode())
        for digest in sorted(blobs):
            add("blobs/sha256/" + digest, blobs[digest])
    partial.replace(out)
    print(f"{out}: {reference}, {out.stat().st_size / 1e6:.1f} MB")


def build_programs(args):
    build = pathlib.Path(args.build)
    programs = {name: build / "bin" / name for name in PROGRAMS if (build / "bin" / name).is_file()}
    if not programs:
        fail(f"{build}/bin holds none of {', '.join(PROGRAMS)}; run make first")
    out = pathlib.Path(args.out or build / "images")
    needed = {name: libraries(path) for name, path in programs.items()}
    common = set.intersection(*needed.values())

    def packed(paths, comment, root):
        layer = Layer()
        for path in sorted(paths):
            layer.file(path, path)
        if root:
            for path, content in FILES.items():
                layer.text(path, content)
            layer.folder("tmp", 0o1777)
            if os.path.exists(AUTHORITIES):
                layer.file(AUTHORITIES, AUTHORITIES, 0o644)
        return Packed(layer, comment)

    base = packed(common, "libraries that all programs share", True)
    sanitized = any("libasan" in path or "libubsan" in path for path in common)
    for name, path in programs.items():
        own = Layer()
        own.file(f"usr/bin/{name}", path)
        layers = [base]
        if needed[name] - common:
            layers.append(packed(needed[name] - common, f"libraries of {name}", False))
        layers.append(Packed(own, name))
        write_image(out / f"{name}.tar", f"{args.prefix}/{name}:{args.tag}", layers, [f"/usr/bin/{name}"],
                    SANITIZER_ENVIRONMENT if sanitized else (), title=name)


def build_single(out, reference, files, entrypoint):
    layer = Layer()
    programs = []
    for item in files:
        path, source = item.split("=", 1)
        layer.file(path, source)
        programs.append(source)
    for source in programs:
        for library in libraries(source):
            layer.file(library, library)
    write_image(out, reference, [Packed(layer, "files")], entrypoint, user="0:0")


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--single":
        rest = sys.argv[2:]
        if "--" not in rest or len(rest) < 5:
            fail("usage: --single OUT.tar NAME:TAG PATH=FILE... -- ENTRYPOINT...")
        cut = rest.index("--")
        build_single(rest[0], rest[1], rest[2:cut], rest[cut + 1:])
        return
    parser = argparse.ArgumentParser(description="OCI archives of the programs, without a container engine.")
    parser.add_argument("--build", default="build/release", help="variant folder whose bin/ holds the programs")
    parser.add_argument("--out", help="folder for the archives (default: BUILD/images)")
    parser.add_argument("--prefix", default="localhost", help="registry and path before the program's name")
    parser.add_argument("--tag", default="dev")
    build_programs(parser.parse_args())


if __name__ == "__main__":
    main()
