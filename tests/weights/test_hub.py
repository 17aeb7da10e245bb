"""Safetensors models of the hub, through its HTTP API on a stand-in: whole, of one commit, verified."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError, ModelNotFoundError, PagodaError, UnsupportedError
from pagoda.weights import hub, partial_file
from pagoda.weights.catalog import resolve_model
from pagoda.weights.checkpoint import load_checkpoint
from tests.models.tiny_checkpoints import TINY_MODELS
from tests.safetensors_files import write_folder
from tests.weights.file_server import Served, file_server, hub_repository
from tests.weights.test_hf_checkpoint import hf_arrays, hf_config

REPO = "some-org/Tiny"
MODEL = TINY_MODELS["qwen2"]
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture
def repository(cache: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return served


def files_of(tmp_path: Path, num_shards: int = 1) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Weights, which the hub keeps as large files, and the rest of a repository."""
    files: dict[str, object] = {
        "tokenizer.json": {},
        "tokenizer_config.json": {},
        "generation_config.json": {"eos_token_id": [1, 2]},
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/rag.jinja": TEMPLATE,
        "pytorch_model.bin": "pickle",
        "notes.txt": "x",
    }
    folder = write_folder(
        tmp_path / "source", hf_config(MODEL), hf_arrays(MODEL), num_shards=num_shards, files=files
    )
    content = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    large = {name: raw for name, raw in content.items() if name.endswith((".safetensors", ".bin"))}
    shutil.rmtree(folder)
    return large, {name: raw for name, raw in content.items() if name not in large}


def names_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


SIDES = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
         "chat_template.jinja", "additional_chat_templates/rag.jinja"}  # fmt: skip


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", [REPO, f"{REPO}:safetensors"])
def test_a_safetensors_repository_becomes_a_folder(
    repository: Served, cache: Path, tmp_path: Path, num_shards: int, name: str
) -> None:
    """What is read, and nothing else: no pickle, no notes; through a redirect as large files have them."""
    large, small = files_of(tmp_path, num_shards)
    hub_repository(repository, REPO, large, small_files=small)
    for file in large:
        path = f"/{REPO}/resolve/c0ffee/{file}"
        repository.redirects[path] = f"{repository.url}/storage/{file}"
        repository.files[f"/storage/{file}"] = repository.files.pop(path)
    folder = resolve_model(name, progress=False)
    assert folder == cache / "models" / REPO
    weights = {file for file in large if file.endswith(".safetensors")}
    index = {"model.safetensors.index.json"} if num_shards > 1 else set()
    assert names_under(folder) == SIDES | weights | index
    with load_checkpoint(folder) as checkpoint:
        assert checkpoint.folder is not None
        assert checkpoint.folder.chat_templates == {"default": TEMPLATE, "rag": TEMPLATE}
        assert checkpoint.folder.end_token_ids() == {1, 2}


def test_a_folder_that_is_here_needs_no_network(
    repository: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large, small_files=small)
    folder = resolve_model(REPO, progress=False)
    repository.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(REPO, progress=False) == folder
    assert repository.requests == []
    with pytest.raises(PagodaError, match="HF_HUB_OFFLINE is set"):
        resolve_model(REPO, progress=False, revision="v2")
    with pytest.raises(PagodaError, match="HF_HUB_OFFLINE is set"):
        resolve_model("some-org/Other", progress=False)


def test_an_interrupted_fetch_goes_on_and_takes_nothing_of_another_commit(
    repository: Served, cache: Path, tmp_path: Path
) -> None:
    """Files of equal size and other content are fetched again; config.json comes last, and marks the end."""
    large, small = files_of(tmp_path, 3)
    hub_repository(repository, REPO, large, small_files=small)
    third = f"/{REPO}/resolve/c0ffee/model-00003-of-00003.safetensors"
    missing = repository.files.pop(third)
    with pytest.raises(ModelNotFoundError, match="404"):
        resolve_model(REPO, progress=False)
    folder = cache / "models" / REPO
    assert not (folder / "config.json").exists()
    changed = dict(large)
    name = "model-00002-of-00003.safetensors"
    changed[name] = changed[name][:-4] + b"\1\1\1\1"
    hub_repository(repository, REPO, changed, revision="f00d", small_files=small)
    repository.requests.clear()
    assert resolve_model(REPO, progress=False) == folder
    fetched = [path.rpartition("/")[2] for path, _ in repository.requests if "/resolve/f00d/" in path]
    assert fetched == [name, "model-00003-of-00003.safetensors", "config.json"]
    assert (folder / name).read_bytes() == changed[name]
    assert (folder / "model-00003-of-00003.safetensors").read_bytes() == missing


def test_safetensors_go_before_gguf_unless_it_is_named(
    repository: Served, cache: Path, tmp_path: Path
) -> None:
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large | {"Tiny-Q4_K_M.gguf": b"GGUF" * 99}, small_files=small)
    folder = cache / "models" / REPO
    assert resolve_model(f"{REPO}:Q4_K_M", progress=False) == folder / "Tiny-Q4_K_M.gguf"
    assert names_under(folder) == {"Tiny-Q4_K_M.gguf"}
    assert resolve_model(f"{REPO}:safetensors", progress=False) == folder
    assert resolve_model(REPO, progress=False) == folder
    assert resolve_model(f"{REPO}:Tiny-Q4_K_M.gguf", progress=False) == folder / "Tiny-Q4_K_M.gguf"
    with pytest.raises(ModelNotFoundError, match="'Q8_0'") as caught:
        resolve_model(f"{REPO}:Q8_0", progress=False)
    assert "Tiny-Q4_K_M.gguf, safetensors" in (caught.value.hint or "")


@pytest.mark.parametrize("revision", ["v2", "refs/pr/1"])
def test_each_revision_has_a_folder_of_its_own(
    repository: Served, cache: Path, tmp_path: Path, revision: str
) -> None:
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large, small_files=small)
    branch = revision.replace("/", "%2F")
    other = small | {"generation_config.json": b"{}"}
    hub_repository(repository, REPO, large, revision="beef", small_files=other, branch=branch)
    main, second = (resolve_model(REPO, progress=False, revision=r) for r in (None, revision))
    assert main != second
    assert main.parent == second.parent == cache / "models" / "some-org"
    assert json.loads((main / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    assert (second / "generation_config.json").read_text() == "{}"
    assert not any("/resolve/c0ffee/" in path and "beef" in path for path, _ in repository.requests)


def test_a_revision_that_does_not_exist_is_named(repository: Served) -> None:
    repository.errors[f"/api/models/{REPO}/revision/v9"] = (404, "RevisionNotFound")
    with pytest.raises(ModelNotFoundError, match=f"{REPO} has no revision 'v9'"):
        resolve_model(REPO, progress=False, revision="v9")


def test_a_gated_repository_says_what_to_do(repository: Served) -> None:
    repository.errors[f"/api/models/{REPO}"] = (403, "GatedRepo")
    with pytest.raises(ModelNotFoundError, match="is gated") as caught:
        resolve_model(REPO, progress=False)
    assert "HF_TOKEN" in (caught.value.hint or "")


def test_what_has_no_revisions_refuses_one(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    for name in (str(path), "smollm2-135m"):
        with pytest.raises(ConfigError, match="revision is 'v1'"):
            resolve_model(name, progress=False, revision="v1")


def test_a_token_goes_to_the_hub_and_nowhere_else(
    repository: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Not to the host that large files are redirected to, not into a log, a message or a file."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large, small_files=small)
    path = f"/{REPO}/resolve/c0ffee/model.safetensors"
    with file_server() as storage:
        storage.files["/blob"] = repository.files.pop(path)
        repository.redirects[path] = f"{storage.url}/blob"
        folder = resolve_model(REPO, progress=True)
        assert storage.requests
        assert not any("authorization" in headers for _, headers in storage.requests)
    assert all(headers.get("authorization") == "Bearer hf_secret" for _, headers in repository.requests)
    repository.errors[f"/api/models/{REPO}/revision/v9"] = (500, "")
    with pytest.raises(PagodaError) as caught:
        resolve_model(REPO, progress=True, revision="v9")
    captured = capsys.readouterr()
    texts = (caplog.text, captured.out, captured.err, str(caught.value), str(caught.value.hint))
    assert not any("hf_secret" in text for text in texts)
    assert not any(b"hf_secret" in p.read_bytes() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_wrong_bytes_are_refused_and_not_kept(
    repository: Served, cache: Path, tmp_path: Path, file: str
) -> None:
    """SHA-256 of large files, git's SHA-1 of small ones."""
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large, small_files=small)
    path = f"/{REPO}/resolve/c0ffee/{file}"
    content = repository.files[path]
    repository.files[path] = content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(PagodaError, match=rf"{file}: SHA-(256|1) is"):
        resolve_model(REPO, progress=False)
    assert not (cache / "models" / REPO / file).exists()
    assert not (cache / "models" / REPO / "config.json").exists()


def test_an_index_that_names_what_the_repository_lacks_is_refused(repository: Served, tmp_path: Path) -> None:
    """D14."""
    large, small = files_of(tmp_path, 2)
    del large["model-00002-of-00002.safetensors"]
    hub_repository(repository, REPO, large, small_files=small)
    with pytest.raises(ModelNotFoundError, match="lacks: model-00002-of-00002"):
        resolve_model(REPO, progress=False)


@pytest.mark.parametrize("place", ["../../evil.safetensors", "/tmp/evil.safetensors", "a\\..\\evil"])
def test_an_index_cannot_choose_a_place_outside_its_folder(
    repository: Served, tmp_path: Path, cache: Path, place: str
) -> None:
    large, small = files_of(tmp_path, 2)
    small["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": place}}).encode()
    hub_repository(repository, REPO, large, small_files=small)
    with pytest.raises(PagodaError, match=r"no \.safetensors file of this folder"):
        resolve_model(REPO, progress=False)
    assert not list(tmp_path.rglob("evil*"))


def test_pickled_weights_are_not_fetched(repository: Served) -> None:
    hub_repository(repository, REPO, {"pytorch_model.bin": b"x"}, small_files={"config.json": b"{}"})
    with pytest.raises(UnsupportedError, match="only pickled weights, which are never loaded"):
        resolve_model(REPO, progress=False)


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    repository: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large, small_files=small)
    usage: Any = type("usage", (), {"free": 1000})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PagodaError, match=r"needs .* kB more in .*, the disk has 1\.0 kB left") as caught:
        resolve_model(REPO, progress=False)
    assert "PAGODA_CACHE" in (caught.value.hint or "")
    assert not any("model.safetensors" in path for path, _ in repository.requests)


def test_a_disk_that_fills_up_is_one_clear_error_and_the_next_try_resumes(
    repository: Served, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = files_of(tmp_path)
    large["model.safetensors"] += bytes(3 << 20)  # more than one write, and no model
    hub_repository(repository, REPO, large, small_files=small)
    write = partial_file.PartialFile.write
    full = OSError(errno.ENOSPC, "No space left on device")

    def until_full(self: partial_file.PartialFile, chunk: bytes) -> None:
        if self.num_bytes > 1 << 20:
            with partial_file.disk_errors(self.path):
                raise full
        write(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(partial_file.PartialFile, "write", until_full)
        with pytest.raises(PagodaError, match=r"cannot write .*\.partial: No space left on device"):
            resolve_model(REPO, progress=False)
    partial = cache / "models" / REPO / "model.safetensors.partial"
    num_there = partial.stat().st_size
    assert num_there > 1 << 20
    repository.requests.clear()
    folder = resolve_model(REPO, progress=False)
    assert f"bytes={num_there}-" in repository.ranges()
    assert (folder / "model.safetensors").read_bytes() == large["model.safetensors"]


def test_progress_tells_what_comes_and_that_it_is_right(
    repository: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = files_of(tmp_path)
    hub_repository(repository, REPO, large, small_files=small)
    resolve_model(REPO, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "model.safetensors: 0 % of" in captured.err
    assert "model.safetensors: " in captured.err and "from the hub, SHA-256 verified" in captured.err


def test_folders_on_disk_need_no_hub(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "m", hf_config(MODEL), {})
    assert resolve_model(str(folder), progress=False) == folder
    ggufs = tmp_path / "g"
    ggufs.mkdir()
    for name in ("m-Q8_0.gguf", "m-Q4_K_M.gguf"):
        (ggufs / name).write_bytes(b"GGUF")
    assert resolve_model(str(ggufs), progress=False) == ggufs / "m-Q4_K_M.gguf"
    for path in ggufs.iterdir():
        path.rename(path.with_name(path.name.replace("m-Q", "x")))
    with pytest.raises(ModelNotFoundError, match="holds no one GGUF file to prefer"):
        resolve_model(str(ggufs), progress=False)
