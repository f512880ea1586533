"""Check what the wheel and the sdist in a folder hold: ``python .ci/check_dist.py dist``."""

import sys
import tarfile
import zipfile
from pathlib import Path

dist = Path(sys.argv[1])
(wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")

with zipfile.ZipFile(wheel) as archive:
    held = set(archive.namelist())
info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
assert {name.split("/")[0] for name in held} == {"torchrl_mt", info}, held
assert {"torchrl_mt/py.typed", f"{info}/licenses/LICENSE"} <= held, held
assets = {
    f"torchrl_mt/view/assets/{page}.{end}"
    for page in ("report", "run")
    for end in ("css", "html.j2", "js")
}
assert assets <= held, held
others = [n for n in held if n.startswith("torchrl_mt/") and not n.endswith((".py", "/py.typed"))]
others = [n for n in others if not n.startswith("torchrl_mt/view/assets/")]
assert not others, others

with tarfile.open(sdist) as archive:
    given = {name.partition("/")[2] for name in archive.getnames()}
source = Path(__file__).resolve().parents[1]
for folder in ("benchmarks", "docs", "examples", "tests", "torchrl_mt"):
    here = {path.relative_to(source).as_posix() for path in (source / folder).rglob("*.py")}
    assert here - given == set(), here - given
assert {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "docs/index.rst"} <= given, given
assert not [name for name in given if name.startswith("docs/_build")]
print(f"{wheel.name}: {len(held)} files; {sdist.name}: {len(given)}")
