"""Files from the network: resumed, verified, published whole or not at all."""

from __future__ import annotations

import multiprocessing
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagoda.errors import ModelNotFoundError, PagodaError
from pagoda.weights import download as downloads
from pagoda.weights.download import RemoteFile, check_answers, download, exclusive
from tests.weights.file_server import Served, file_server, sha256

CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def remote(served: Served) -> RemoteFile:
    served.files["/model.gguf"] = CONTENT
    return RemoteFile(f"{served.url}/model.gguf", len(CONTENT), sha256(CONTENT))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "model.gguf"


def partial_of(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def fetch(remote: RemoteFile, target: Path) -> list[int]:
    reported: list[int] = []
    download(remote, target, report=reported.append, retry_wait_s=0.001)
    return reported


def test_a_file_arrives_whole_and_leaves_nothing_beside_it(remote: RemoteFile, target: Path) -> None:
    reported = fetch(remote, target)
    assert target.read_bytes() == CONTENT
    assert [p.name for p in target.parent.iterdir()] == ["model.gguf"]
    assert reported == sorted(reported)
    assert reported[-1] == len(CONTENT)


@pytest.mark.parametrize("num_there", [1, 1_000_000, len(CONTENT) - 1])
def test_a_partial_file_is_continued_and_not_fetched_again(
    served: Served, remote: RemoteFile, target: Path, num_there: int
) -> None:
    target.parent.mkdir()
    partial_of(target).write_bytes(CONTENT[:num_there])
    fetch(remote, target)
    assert target.read_bytes() == CONTENT
    assert served.ranges() == [f"bytes={num_there}-"]


def test_a_complete_partial_file_needs_no_server(served: Served, remote: RemoteFile, target: Path) -> None:
    target.parent.mkdir()
    partial_of(target).write_bytes(CONTENT)
    fetch(remote, target)
    assert target.read_bytes() == CONTENT
    assert served.requests == []


def test_a_server_that_ignores_ranges_sends_all_again(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    served.honours_range = False
    target.parent.mkdir()
    partial_of(target).write_bytes(CONTENT[:500_000])
    fetch(remote, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("inherited", [b"x" * 1_000_000, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)])
def test_a_wrong_partial_file_is_thrown_away_and_fetched_afresh(
    remote: RemoteFile, target: Path, inherited: bytes
) -> None:
    target.parent.mkdir()
    partial_of(target).write_bytes(inherited)
    fetch(remote, target)
    assert target.read_bytes() == CONTENT


def test_a_server_that_dies_midway_is_asked_for_the_rest(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    served.cut_after_bytes = 700_000
    fetch(remote, target)
    assert target.read_bytes() == CONTENT
    starts = [int(r.removeprefix("bytes=").rstrip("-")) for r in served.ranges() if r]
    assert len(starts) >= 3
    assert starts == sorted(set(starts))


def test_a_server_that_dies_every_time_ends_in_an_error_and_the_next_try_resumes(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    served.cut_after_bytes = 10
    with pytest.raises(PagodaError, match=r"closed early.* of 3000000 bytes"):
        fetch(remote, target)
    assert not target.exists()
    num_there = partial_of(target).stat().st_size
    assert 0 < num_there < len(CONTENT)
    served.cut_after_bytes = None
    served.requests.clear()
    fetch(remote, target)
    assert target.read_bytes() == CONTENT
    assert served.ranges() == [f"bytes={num_there}-"]


def test_wrong_bytes_of_the_right_length_are_refused_with_both_digests(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    served.files["/model.gguf"] = wrong = CONTENT[:-1] + b"?"
    with pytest.raises(PagodaError) as caught:
        fetch(remote, target)
    assert sha256(CONTENT) in caught.value.message
    assert sha256(wrong) in caught.value.message
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("body", [b"", b"<html>log in first</html>", CONTENT + b"more"])
def test_a_file_of_another_size_is_refused_before_it_is_read(
    served: Served, remote: RemoteFile, target: Path, body: bytes
) -> None:
    served.files["/model.gguf"] = body
    with pytest.raises(PagodaError, match=f"has a file of {len(body)} bytes, not {len(CONTENT)}"):
        fetch(remote, target)
    assert not target.exists()


def test_a_page_in_place_of_the_file_does_not_cost_what_is_here_already(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    target.parent.mkdir()
    partial_of(target).write_bytes(CONTENT[:900_000])
    served.honours_range = False
    served.files["/model.gguf"] = b"<html>log in first</html>"
    with pytest.raises(PagodaError):
        fetch(remote, target)
    assert partial_of(target).read_bytes() == CONTENT[:900_000]


@pytest.mark.parametrize(
    ("body", "complaint"), [(CONTENT + b"more", "more bytes came"), (CONTENT[:-9], "early")]
)
def test_a_body_without_a_length_is_still_bounded(
    served: Served, remote: RemoteFile, target: Path, body: bytes, complaint: str
) -> None:
    served.sends_length = False
    served.honours_range = False
    served.files["/model.gguf"] = body
    with pytest.raises(PagodaError, match=complaint):
        fetch(remote, target)
    assert not target.exists()


def test_a_shorter_file_on_the_server_is_told_from_a_range_error(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    target.parent.mkdir()
    partial_of(target).write_bytes(CONTENT[:2_000_000])
    served.files["/model.gguf"] = CONTENT[:1_500_000]
    with pytest.raises(PagodaError, match="has a file of 1500000 bytes"):
        fetch(remote, target)


def test_busy_answers_are_asked_again(served: Served, remote: RemoteFile, target: Path) -> None:
    served.statuses = [503, 429, 500]
    fetch(remote, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "kind"), [(404, ModelNotFoundError), (401, PagodaError), (403, PagodaError)]
)
def test_a_refusal_is_final(
    served: Served, remote: RemoteFile, target: Path, status: int, kind: type[PagodaError]
) -> None:
    served.statuses = [status] * 9
    with pytest.raises(kind, match=str(status)):
        fetch(remote, target)
    assert len(served.requests) == 1


def test_a_token_does_not_follow_a_redirect_to_another_host(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    with file_server() as content_host:
        content_host.files["/blob"] = CONTENT
        served.redirects["/model.gguf"] = f"{content_host.url}/blob"
        secret = {"Authorization": "Bearer secret"}
        fetch(RemoteFile(remote.url, remote.size_bytes, remote.checksum, secret), target)
        assert served.requests[0][1]["authorization"] == "Bearer secret"
        assert "authorization" not in content_host.requests[0][1]
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/file", "/etc/passwd"])
def test_only_http_is_spoken(target: Path, url: str) -> None:
    with pytest.raises(PagodaError, match="not an http"):
        fetch(RemoteFile(url, 1, "0" * 64), target)


def test_a_folder_that_cannot_be_written_is_one_clear_error(remote: RemoteFile, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(PagodaError, match="cannot write") as caught:
        fetch(remote, tmp_path / "models" / "model.gguf")
    assert "PAGODA_CACHE" in (caught.value.hint or "")


def test_a_server_that_never_answers_is_given_up_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/model.gguf"
        with pytest.raises(PagodaError, match=r"did not answer|timed out"):
            check_answers(url)
    with pytest.raises(PagodaError, match="cannot be reached"):
        check_answers(url)


def test_a_server_that_answers_is_not_made_to_send_the_file(served: Served, remote: RemoteFile) -> None:
    check_answers(remote.url)
    assert served.requests[0][1]["range"] == "bytes=0-0"


def _pull(url: str, target: Path, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    with exclusive(target):
        if not target.exists():
            download(RemoteFile(url, len(CONTENT), sha256(CONTENT)), target)


def test_one_holder_at_a_time_however_often_the_lock_is_made_and_removed(target: Path) -> None:
    """A holder removes the lock's file, also between two looks of one who has just locked it."""
    inside = threading.Lock()

    def enter_often() -> None:
        for _ in range(500):
            with exclusive(target):
                assert inside.acquire(blocking=False)
                inside.release()

    with ThreadPoolExecutor(4) as pool:
        for entered in [pool.submit(enter_often) for _ in range(4)]:
            entered.result()


def test_processes_that_pull_one_file_at_once_fetch_it_once(
    served: Served, remote: RemoteFile, target: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    processes = [context.Process(target=_pull, args=(remote.url, target, start)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert target.read_bytes() == CONTENT
    assert len(served.requests) == 1
    assert [p.name for p in target.parent.iterdir()] == ["model.gguf"]


def test_the_lock_admits_one_at_a_time_and_tells_those_who_wait(target: Path) -> None:
    num_inside = 0
    most_inside = 0
    told: list[int] = []

    def enter(number: int) -> None:
        nonlocal num_inside, most_inside
        for _ in range(20):
            with exclusive(target, waiting=lambda: told.append(number)):
                num_inside += 1
                most_inside = max(most_inside, num_inside)
                pause.wait(0.0005)
                num_inside -= 1

    pause = threading.Event()
    threads = [threading.Thread(target=enter, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most_inside == 1
    assert told
    assert list(target.parent.iterdir()) == []
