"""Generates the code beside the .proto files; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` under `out`, laid out as the packages are."""
    protos = sorted(str(p) for p in ROOT.glob("pomona/v1/*.proto"))
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main([*arguments, *protos]):
        sys.exit(1)


def stale() -> list[str]:
    """Generated files that differ from what the .proto files give now, are missing, or have no .proto any more."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*_pb2*.py*")}
    here = {p.relative_to(ROOT): p.read_bytes() for p in ROOT.glob("pomona/v1/*_pb2*.py*")}
    return sorted(str(p) for p in fresh.keys() | here.keys() if fresh.get(p) != here.get(p))


if __name__ == "__main__":
    if "--check" in sys.argv:
        if differing := stale():
            print(f"generated code is not up to date: {', '.join(differing)}; run `make proto`", file=sys.stderr)
            sys.exit(1)
        print("generated code is up to date")
    else:
        generate(ROOT)
