"""A software bill of materials of this environment: CycloneDX 1.5 JSON, from the metadata of what is installed.

    python -m benchmarks.sbom --out build/sbom.json

Each component has name, version, license, package URL and dependencies. Its hash is the SHA-256 of its RECORD, the file
in which an installer lists every file of the package with its hash. With `--verify` all these files are hashed, and one
that is not as RECORD says makes the command fail. No date, host or path is in it: one environment gives one document.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageMetadata, distributions
from pathlib import Path
from urllib.parse import quote

from benchmarks.lock import normalized

PRODUCT = "moefold"
_MAX_LICENSE = 64


@dataclass(frozen=True)
class Package:
    """An installed package; its metadata are parsed once."""

    files: Distribution
    metadata: PackageMetadata

    @property
    def name(self) -> str:
        return self.metadata["Name"]

    @property
    def version(self) -> str:
        return self.metadata["Version"]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{normalized(self.name)}@{quote(self.version, safe='.')}"


def installed(found: Iterable[Distribution] | None = None) -> list[Package]:
    """One of each name, the first that Python would import, sorted."""
    packages: dict[str, Package] = {}
    for each in distributions() if found is None else found:
        package = Package(each, each.metadata)
        if package.name:
            packages.setdefault(normalized(package.name), package)
    return [packages[name] for name in sorted(packages)]


def document(packages: Iterable[Package], verify: bool = False) -> dict[str, object]:
    parts = {normalized(each.name): each for each in packages}
    components = {name: component(each, verify) for name, each in parts.items()}
    product = components.pop(PRODUCT, None)
    body: dict[str, object] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**(product or {"name": PRODUCT, "bom-ref": PRODUCT}), "type": "application"}},
        "components": list(components.values()),
        "dependencies": [
            {"ref": each.purl, "dependsOn": sorted(parts[name].purl for name in needs(each) if name in parts)}
            for each in parts.values()
        ],
    }
    # From the contents, so that the same environment has the same number.
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
    return {**body, "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"}


def component(package: Package, verify: bool = False) -> dict[str, object]:
    record = package.files.read_text("RECORD")
    found: dict[str, object] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
    }
    if licenses := license_of(package):
        found["licenses"] = licenses
    if record:
        found["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(record.encode()).hexdigest()}]
        properties = [{"name": "moefold:hash-of", "value": "RECORD"}]
        if verify:
            changed = list(changed_files(package))
            said = "true" if not changed else f"changed: {', '.join(changed[:5])}"
            properties.append({"name": "moefold:verified", "value": said})
        found["properties"] = properties
    return found


def license_of(package: Package) -> list[dict[str, object]]:
    """An SPDX expression where the package has one; else the name it gives, or that of its classifiers."""
    if expression := package.metadata.get_all("License-Expression"):
        return [{"expression": expression[0]}]
    classifiers = package.metadata.get_all("Classifier") or []
    names = [each.rsplit(" :: ", 1)[1] for each in classifiers if each.startswith("License :: ")]
    text = "".join(package.metadata.get_all("License") or []).strip()
    # Some packages have the whole text there.
    if not names and text and len(text) <= _MAX_LICENSE and "\n" not in text:
        names = [text]
    return [{"license": {"name": name}} for name in names]


def needs(package: Package) -> set[str]:
    """Names that a package requires, those of extras left out."""
    plain = [each for each in package.metadata.get_all("Requires-Dist") or () if "extra ==" not in each]
    return {normalized(re.split(r"[^\w.-]", each.strip(), maxsplit=1)[0]) for each in plain}


def changed_files(package: Package) -> Iterator[str]:
    """Files that are missing or not as RECORD says. Bytecode and RECORD itself have no hash there."""
    for file in package.files.files or ():
        if file.hash is None or file.hash.mode not in ("sha256", "sha384", "sha512"):
            continue
        try:
            with open(str(package.files.locate_file(file)), "rb") as opened:
                digest = hashlib.file_digest(opened, file.hash.mode).digest()
        except OSError:
            yield str(file)
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            yield str(file)


def unverified(made: dict[str, object]) -> list[str]:
    components = made["components"]
    assert isinstance(components, list)
    return [
        f"{each['name']} {each['version']}: {entry['value']}"
        for each in components
        for entry in each.get("properties", [])
        if entry["name"] == "moefold:verified" and entry["value"] != "true"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/sbom.json"), help="file to write (build/sbom.json)")
    parser.add_argument("--verify", action="store_true", help="hash every file of every package")
    args = parser.parse_args()
    packages = installed()
    made = document(packages, args.verify)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    changed = unverified(made)
    said = f", {len(changed)} with changed files" if args.verify else ""
    print(f"{args.out}: {len(packages)} packages{said}")
    for line in changed:
        print(line, file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
