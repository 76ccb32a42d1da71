#!/usr/bin/env python3
"""What documents name exists: documents.py ROOT. Links and their anchors, paths of this repository, targets of make, options
of our commands, environment variables and metrics. Fails when it looked at nothing."""
import fnmatch
import pathlib
import re
import sys

CODE = re.compile(r"```.*?```|`[^`\n]+`|(?:(?<=\n\n)|\A)(?:    [^\n]*\n)+", re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
PATH = re.compile(r"(?<![\w./<>$~-])([A-Za-z][\w.-]*(?:/[\w.*-]+)+/?)(?![\w<>$])")
MAKE = re.compile(r"(?<![\w-])make ((?:-\w+(?: \d+)? )*)([a-z][\w-]*)(?![\w/.-])")
COMMAND = re.compile(r"(?:^[ $]*|`)(?:[\w./-]+/|kubectl )?(diloco(?:-\w+)?) ([^`|;&\n]*)", re.M)
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
VARIABLE = re.compile(r"\bDILOCO_[A-Z_]+\b")
METRIC = re.compile(r"\bdiloco_[a-z_]+\b")
SUFFIX = re.compile(r"_(bucket|sum|count)$")
SOURCES = ("*.c", "*.h", "*.py", "*.sh", "*.yaml", "*.tpl", "Makefile")
MADE = ("build", "tests/bench/baseline.json")  # By make; need not be there.


def anchors(text):
    """As GitHub derives them from headings."""
    titles = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower())
              for title in HEADING.findall(re.sub(r"```.*?```", "", text, flags=re.S)))
    return {title.replace(" ", "-") for title in titles}


def exists(root, name):
    name = name.rstrip("/")
    if "*" in name:
        return any(root.glob(name))
    path = root / name
    return path.exists() or any(path.parent.glob(path.name + ".[chp]*"))  # A module is named without its ending.


def sources(root, tops):
    for top in tops:
        for path in sorted((root / top).rglob("*")) if (root / top).is_dir() else [root / top]:
            if path.is_file() and path.parent.name != "lint" and any(fnmatch.fnmatch(path.name, pattern) for pattern in SOURCES):
                yield path.read_text(encoding="utf-8", errors="replace")


def check(root, path, text, tops, targets, commands, program):
    where = path.relative_to(root)

    def fault(at, what):
        return f"{where}:{text.count(chr(10), 0, at) + 1}: {what}"

    for match in LINK.finditer(text):
        target, _, anchor = match.group(1).partition("#")
        if re.match(r"\w+:", target):
            continue
        to = (path.parent / target) if target else path
        if not to.exists():
            yield fault(match.start(), f"link to {target}, which does not exist")
        elif anchor and to.suffix == ".md" and anchor not in anchors(to.read_text(encoding="utf-8")):
            yield fault(match.start(), f"link to {match.group(1)}: there is no such heading")
    for span in CODE.finditer(text):
        code = span.group(0)
        for match in PATH.finditer(code):
            name = match.group(1).rstrip(".")
            if name.split("/")[0] in tops and name not in MADE and not exists(root, name) and not exists(path.parent, name):
                yield fault(span.start() + match.start(), f"{name} does not exist")
        for match in MAKE.finditer(code):
            if match.group(2) not in targets:
                yield fault(span.start() + match.start(), f"make {match.group(2)}: there is no such target")
        for line in COMMAND.finditer(re.sub(r"\\\n", "  ", code)):
            for option in OPTION.findall(line.group(2)):
                if f'"{option}"' not in commands:
                    yield fault(span.start(), f"{line.group(1)} has no option --{option}")
    for match in list(VARIABLE.finditer(text)) + list(METRIC.finditer(text)):
        if match.group(0) not in program and SUFFIX.sub("", match.group(0)) not in program:
            yield fault(match.start(), f"{match.group(0)} is nowhere in the tree")


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    makefile = root / "Makefile"
    tops = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")} - set(MADE)
    targets = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^([\w -]+):(?!=)", makefile.read_text(encoding="utf-8"), re.M)))) \
        if makefile.exists() else set()
    commands = "\n".join(sources(root, sorted(tops - {"docs", "tests"})))
    program = commands + "\n".join(sources(root, ["Makefile", "tests"]))
    documents = sorted({*root.glob("*.md"), *(path for top in tops for path in (root / top).rglob("*.md"))})
    faults = [fault for path in documents
              for fault in check(root, path, path.read_text(encoding="utf-8"), tops, targets, commands, program)]
    if not documents:
        faults.append("documents: found none; wrong folder?")
    for fault in faults:
        print(fault)
    print(f"documents: {len(documents)} documents, {len(faults)} faults")
    return 1 if faults else 0


sys.exit(main())
