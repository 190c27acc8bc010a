"""Builds a release and checks it; uploads nothing.

    python scripts/release.py --repository https://github.com/OWNER/memest    # into dist/
    python scripts/release.py --repository ... --rehearse    # accepts "unreleased" as the date

The tree has to be clean, and pyproject.toml, `memest.__version__` and CHANGELOG.md have to name one
version. sdist and wheel are built from the commit, with absolute links in README.md: PyPI shows the
text without the repository. The wheel is installed in a fresh environment, where `memest doctor`
runs. `twine check` renders the description if twine is installed. The commands that tag and upload
are printed at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL_BYTES = 2_000_000
NOT_IN_SDIST = ("docs", "scripts", "tests", "validation")


def faults(root: Path, *, is_rehearsal: bool = False) -> list[str]:
    """Return the reasons why `root` cannot be released."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (root / "memest" / "__init__.py").read_text(encoding="utf-8")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    version = project["version"]
    found = []
    if f'__version__ = "{version}"' not in source:
        found.append(f"`memest.__version__` is not {version}, as pyproject.toml has")
    heading = re.search(r"^## (.+)$", changes, re.MULTILINE)
    date = r"(\d{4}-\d\d-\d\d|unreleased)" if is_rehearsal else r"\d{4}-\d\d-\d\d"
    if not heading or not re.fullmatch(rf"{re.escape(version)}, {date}", heading[1]):
        title = heading[1] if heading else "nothing"
        found.append(f"CHANGELOG.md begins with `{title}`, not with `{version}, YYYY-MM-DD`")
    changed = _output(["git", "status", "--porcelain"], root)
    if changed:
        found.append(f"the tree is not clean:\n{changed}")
    return found


def with_absolute_links(text: str, base: str) -> str:
    """Return Markdown whose relative links begin with `base`.

    >>> with_absolute_links("[a](docs/a.md) [b](https://b.org) [c](#c)", "https://x/")
    '[a](https://x/docs/a.md) [b](https://b.org) [c](#c)'
    """
    return re.sub(r"\]\((?!https?:|#|mailto:)", f"]({base}", text)


def faults_of_files(wheel: Path, sdist: Path) -> list[str]:
    """Return the reasons why the built files cannot be uploaded."""
    found = []
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        found.append(f"{wheel.name} has {wheel.stat().st_size} bytes, over {MAX_WHEEL_BYTES}")
    with tarfile.open(sdist) as archive:
        inside = {Path(name).parts[1] for name in archive.getnames() if "/" in name}
    found += [f"{sdist.name} has `{name}`" for name in NOT_IN_SDIST if name in inside]
    return found


def build(root: Path, base: str, dist: Path, folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist of the commit in `root`; return their paths."""
    content = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(content.stdout)) as archive:
        archive.extractall(folder / "tree", filter="data")
    readme = folder / "tree" / "README.md"
    text = with_absolute_links(readme.read_text(encoding="utf-8"), base)
    readme.write_text(text, encoding="utf-8")
    python = environment(folder / "build")
    _run([python, "-m", "pip", "install", "-q", "build"])
    _run([python, "-m", "build", "--outdir", dist, folder / "tree"])
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def environment(folder: Path) -> Path:
    """Make a virtual environment and return its interpreter."""
    venv.create(folder, with_pip=True)
    return next(p for p in (folder / "bin/python", folder / "Scripts/python.exe") if p.exists())


def main(words: list[str]) -> int:
    """Build and check; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", required=True, help="URL of the public repository")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="empty folder for files")
    parser.add_argument("--rehearse", action="store_true", help="accept an unreleased changelog")
    options = parser.parse_args(words)
    if options.dist.exists() and any(options.dist.iterdir()):
        return _fail([f"`{options.dist}` is not empty"])
    if found := faults(ROOT, is_rehearsal=options.rehearse):
        return _fail(found)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    base = f"{options.repository.rstrip('/')}/blob/v{version}/"
    with tempfile.TemporaryDirectory(prefix="memest-release-") as name:
        folder = Path(name)
        wheel, sdist = build(ROOT, base, options.dist, folder)
        if found := faults_of_files(wheel, sdist):
            return _fail(found)
        if importlib.util.find_spec("twine"):
            _run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])
        else:
            print("twine is not installed: the description is not rendered", flush=True)
        python = environment(folder / "fresh")
        _run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel])
        _run([python.with_name("memest"), "doctor"], cwd=folder)
    size = wheel.stat().st_size
    print(f"\n{wheel.name} has {size} bytes. To release it:\n")
    print(f"git tag -a v{version} -m 'memest {version}' && git push origin v{version}")
    print(f"python -m twine upload {wheel} {sdist}")
    return 0


def _fail(found: list[str]) -> int:
    for fault in found:
        print(f"cannot be released: {fault}", file=sys.stderr)
    return 1


def _run(command: list[object], cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def _output(command: list[str], root: Path) -> str:
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
