"""What this process may use of the machine: cores and memory, as affinity and control groups leave them.

A host's own numbers are wrong inside a container: threads beyond the CPU quota are throttled, and memory
beyond the group's limit gets the process killed. Limits are hierarchical, so every level counts.
Sources: the kernel's cgroup-v1 and cgroup-v2 documents, proc(5), cgroups(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def num_usable_cores(root: Path = _ROOT) -> int:
    """Threads worth running: min(affinity, floor(CPU quota), physical cores), at least 1.

    `root` is where `proc` and `sys` are found, here and below; tests point it at a made-up tree.
    """
    cores = min(len(affinity(root)), num_physical_cores(root))
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def affinity(root: Path = _ROOT) -> frozenset[int]:
    """Numbers of the logical CPUs that the process may run on; cpusets are part of it."""
    for line in _lines(root, "proc/self/status"):
        if line.startswith("Cpus_allowed_list:"):
            return _parse_cpu_list(line.partition(":")[2])
    return frozenset(range(os.cpu_count() or 1))


def num_physical_cores(root: Path = _ROOT) -> int:
    """Physical cores among the CPUs of `affinity`: hyperthreads of one core count once."""
    cores = set()
    for cpu in affinity(root):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _text(root, f"{folder}/core_cpus_list") or _text(root, f"{folder}/thread_siblings_list")
        cores.add(siblings or str(cpu))
    return len(cores)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU time the control groups allow, in cores (1.5 is one and a half); None when unlimited."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        v2 = _text(root, f"{folder}/cpu.max")  # "150000 100000" or "max 100000"
        v1 = [_text(root, f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = (_number(word) for word in (v2.split() if v2 else v1))
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Memory this process could ever have: the machine's, or less where a control group limits it."""
    limits = [limit for _, limit in _memory_limits(root)]
    return min([_meminfo_bytes(root, "MemTotal"), *limits])


def memory_available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken now without swapping or hitting a control group's limit.

    Page cache counts as available, as in the kernel's own MemAvailable.
    """
    available = [_meminfo_bytes(root, "MemAvailable")]
    for folder, limit in _memory_limits(root):
        used = _number(_text(root, f"{folder}/memory.current")) or _number(
            _text(root, f"{folder}/memory.usage_in_bytes")
        )
        available.append(limit - max(0, (used or 0) - _page_cache_bytes(root, folder)))
    return max(0, min(available))


def _memory_limits(root: Path) -> Iterator[tuple[str, int]]:
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(_text(root, f"{folder}/{name}"))
            if limit is not None and limit < 1 << 60:  # v1 spells "no limit" as almost 2^63
                yield folder, limit


def _page_cache_bytes(root: Path, folder: str) -> int:
    stat = dict(line.split(maxsplit=1) for line in _lines(root, f"{folder}/memory.stat") if " " in line)
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1: with the groups below
    return sum(_number(stat.get(f"{prefix}{name}_file")) or 0 for name in ("inactive", "active"))


def _meminfo_bytes(root: Path, name: str) -> int:
    for line in _lines(root, "proc/meminfo"):
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_folders(root: Path, controller: str) -> Iterator[str]:
    """Folders of the process's control group and all above it, as far as they are visible."""
    for mount_root, mount_point, controllers in _cgroup_mounts(root):
        if controllers and controller not in controllers:
            continue
        path = Path(_cgroup_path(root, controller if controllers else ""))
        # Without a cgroup namespace the path is the host's, while the mount starts at the container's.
        inside = path.relative_to(mount_root) if path.is_relative_to(mount_root) else Path()
        if ".." in inside.parts:  # the process sits above what its namespace shows
            inside = Path()
        for folder in (inside, *inside.parents):
            yield str(Path(mount_point.lstrip("/")) / folder)


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, frozenset[str]]]:
    """(root within the hierarchy, mount point, controllers: empty for v2)."""
    for line in _lines(root, "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, (fstype, *_, options) = left.split(), right.split() or [""]
        if len(fields) > 4 and fstype == "cgroup2":
            yield fields[3], fields[4], frozenset()
        elif len(fields) > 4 and fstype == "cgroup":
            yield fields[3], fields[4], frozenset(options.split(","))


def _cgroup_path(root: Path, controller: str) -> str:
    for line in _lines(root, "proc/self/cgroup"):  # "4:cpu,cpuacct:/path"; v2: "0::/path"
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return "/"


def _parse_cpu_list(text: str) -> frozenset[int]:
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _number(text: str | None) -> int | None:
    """The number in a control file; None for "max", "-1", an absent file."""
    return int(text) if text and text.isdigit() else None


def _text(root: Path, name: str) -> str | None:
    try:
        return (root / name).read_text().strip()
    except OSError:
        return None


def _lines(root: Path, name: str) -> list[str]:
    return (_text(root, name) or "").splitlines()
