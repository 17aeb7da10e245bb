"""Cores and memory as affinity and control groups leave them, read from made-up `proc` and `sys` trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda import machine

GIB = 1 << 30
CGROUP = "sys/fs/cgroup"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
)


def host(cpus: str = "0-7", *, threads_per_core: int = 1) -> dict[str, str]:
    """A host with 64 GiB, 60 of them available, whose process may run on `cpus`."""
    files = {
        "proc/self/status": f"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}",
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {60 << 20} kB",
    }
    for cpu in range(16):
        first = cpu // threads_per_core * threads_per_core
        siblings = f"{first}-{first + threads_per_core - 1}" if threads_per_core > 1 else str(cpu)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"] = siblings
    return files


def v2(path: str, mount_root: str = "/") -> dict[str, str]:
    """A process at `path` of the one v2 hierarchy."""
    mount = f"31 23 0:28 {mount_root} /{CGROUP} rw,relatime - cgroup2 cgroup2 rw"
    return {"proc/self/mountinfo": mount, "proc/self/cgroup": f"0::{path}"}


def v1(cpu: str = "/", memory: str = "/") -> dict[str, str]:
    """A process in v1 hierarchies, cpu and cpuacct mounted together as most systems do."""
    return {
        "proc/self/mountinfo": V1_MOUNTS,
        "proc/self/cgroup": f"4:memory:{memory}\n2:cpu,cpuacct:{cpu}\n0::/",
    }


def tree(root: Path, *parts: dict[str, str]) -> Path:
    for part in parts:
        for name, text in part.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cpus", "threads_per_core", "cpu_max", "usable"),
    [
        ("0-7", 1, "max 100000", 8),
        ("0-7", 1, "400000 100000", 4),  # 4-CPU container on an 8-CPU host
        ("0-1", 1, "400000 100000", 2),  # taskset -c 0-1
        ("0-7", 1, "150000 100000", 1),  # 1.5 cores: a second thread would be throttled half the time
        ("0-7", 1, "299999 100000", 2),
        ("0-7", 1, "10000 100000", 1),  # a tenth of a core still runs one thread
        ("0-7", 2, "max 100000", 4),  # hyperthreads of a core share its vector units
        ("0,2,4,6", 2, "max 100000", 4),
        ("0-1,4", 2, "max 100000", 2),
        ("3", 1, "max 100000", 1),
    ],
)
def test_threads_are_the_least_of_affinity_whole_quota_and_physical_cores(
    tmp_path: Path, cpus: str, threads_per_core: int, cpu_max: str, usable: int
) -> None:
    """E15: the thread count comes from the control group and the affinity, not from the host."""
    root = tree(
        tmp_path,
        host(cpus, threads_per_core=threads_per_core),
        v2("/app"),
        {f"{CGROUP}/app/cpu.max": cpu_max},
    )
    assert machine.num_usable_cores(root) == usable


def test_v1_quota_counts_and_minus_one_is_no_quota(tmp_path: Path) -> None:
    """E15 on the first version of control groups."""
    group = f"{CGROUP}/cpu,cpuacct/docker/abc"
    root = tree(
        tmp_path,
        host(),
        v1(cpu="/docker/abc"),
        {f"{CGROUP}/cpu,cpuacct/cpu.cfs_quota_us": "-1", f"{CGROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000"},
        {f"{group}/cpu.cfs_quota_us": "250000", f"{group}/cpu.cfs_period_us": "100000"},
    )
    assert machine.cpu_quota(root) == 2.5
    assert machine.num_usable_cores(root) == 2
    (root / group / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.cpu_quota(root) is None


def test_a_limit_anywhere_above_the_process_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        host(),
        v2("/pod/app"),
        {f"{CGROUP}/pod/cpu.max": "200000 100000", f"{CGROUP}/pod/app/cpu.max": "max 100000"},
        {f"{CGROUP}/pod/memory.max": str(3 * GIB), f"{CGROUP}/pod/app/memory.max": str(5 * GIB)},
    )
    assert machine.num_usable_cores(root) == 2
    assert machine.memory_limit_bytes(root) == 3 * GIB


@pytest.mark.parametrize(
    ("path", "mount_root"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../other", "/"), ("/elsewhere", "/docker/abc")],
)
def test_container_without_a_cgroup_namespace_reads_its_own_mount(
    tmp_path: Path, path: str, mount_root: str
) -> None:
    root = tree(tmp_path, host(), v2(path, mount_root), {f"{CGROUP}/cpu.max": "300000 100000"})
    assert machine.num_usable_cores(root) == 3


def test_memory_without_limits_is_the_machines(tmp_path: Path) -> None:
    root = tree(tmp_path, host(), v2("/app"), {f"{CGROUP}/app/memory.max": "max"})
    assert machine.memory_limit_bytes(root) == 64 * GIB
    assert machine.memory_available_bytes(root) == 60 * GIB


def test_memory_left_in_a_group_is_its_limit_less_what_is_not_page_cache(tmp_path: Path) -> None:
    group = f"{CGROUP}/app"
    root = tree(
        tmp_path,
        host(),
        v2("/app"),
        {f"{group}/memory.max": str(8 * GIB), f"{group}/memory.current": str(6 * GIB)},
        {f"{group}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}"},
    )
    assert machine.memory_limit_bytes(root) == 8 * GIB
    assert machine.memory_available_bytes(root) == 5 * GIB
    (root / group / "memory.high").write_text(str(4 * GIB))  # throttled there, long before it is killed
    assert machine.memory_limit_bytes(root) == 4 * GIB
    assert machine.memory_available_bytes(root) == GIB


def test_v1_memory_limit_and_its_huge_number_for_none(tmp_path: Path) -> None:
    group = f"{CGROUP}/memory/docker/abc"
    root = tree(
        tmp_path,
        host(),
        v1(memory="/docker/abc"),
        {f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712"},
        {f"{group}/memory.limit_in_bytes": str(2 * GIB), f"{group}/memory.usage_in_bytes": str(GIB)},
        {f"{group}/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0"},
    )
    assert machine.memory_limit_bytes(root) == 2 * GIB
    assert machine.memory_available_bytes(root) == 2 * GIB - GIB // 2


def test_used_up_memory_is_zero_and_not_negative(tmp_path: Path) -> None:
    group = f"{CGROUP}/app"
    root = tree(
        tmp_path,
        host(),
        v2("/app"),
        {f"{group}/memory.max": str(GIB), f"{group}/memory.current": str(2 * GIB)},
    )
    assert machine.memory_available_bytes(root) == 0


def test_a_system_without_proc_still_answers(tmp_path: Path) -> None:
    assert 1 <= machine.num_usable_cores(tmp_path) <= (os.cpu_count() or 1)
    assert machine.memory_limit_bytes(tmp_path) > 0
    assert machine.memory_available_bytes(tmp_path) > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_the_real_process_obeys_its_affinity() -> None:
    """E15: one CPU allowed, one thread used."""
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{one}]); from pagoda.machine import *"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; print(num_usable_cores())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "1"
