"""What keeps a process of model-written code in its place: limits, filters of the kernel, namespaces.

It needs only the standard library. The package's README says what each level keeps out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL = {"death": 1, "dumpable": 4, "no_new_privileges": 38, "seccomp": 22, "subreaper": 36}
_NEW = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
_NEW |= {"pid": 0x20000000, "net": 0x40000000}
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = 0x1000, 0x4000, 0x40000, 2, 4, 8
#: Numbers of system calls that are the same on every architecture.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
#: By architecture: its name in filters, pivot_root, capset, and the system calls that are refused. Beside namespaces:
#: files in memory (no limit counts them), io_uring, BPF, performance counters, keys and page faults. Without them also:
#: sockets, tracing, memory and descriptors of other processes, mounts and namespaces.
_ARCHITECTURES = {
    "x86_64": (0xC000003E, 155, 126, (319, 425, 321, 298, 248, 249, 250, 323), (41, 101, 310, 311, 438, 165, 272, 308)),
    "aarch64": (0xC00000B7, 41, 91, (279, 425, 280, 241, 217, 218, 219, 282), (198, 117, 270, 271, 438, 40, 97, 268)),
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/opt")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
#: Landlock's rights: execute, read a file, read a folder; and all of its first five versions.
_READ, _EVERYTHING = 0b1101, (1 << 16) - 1
_OF_FILES = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)  #: rights that fit a file


def _check(code: int, what: str) -> int:
    if code < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return code


def control(name: str, value: int) -> None:
    """Set a property of this process by prctl(2)."""
    _check(_LIBC.prctl(_PRCTL[name], value, 0, 0, 0), f"prctl {name}")


def readable_paths(further: Sequence[str]) -> list[str]:
    """Return the existing paths that code may read: the system's programs, and this interpreter."""
    here = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *further]
    return [path for path in dict.fromkeys([*_SYSTEM, *_SYSTEM_FILES, *here]) if os.path.lexists(path)]


def limit(limits: dict[str, Any], processes: int | None) -> None:
    """Set resource limits of this process and its children."""
    cpu = int(limits["seconds"]) + 1
    wanted = {"CPU": (cpu, cpu + 1), "FSIZE": limits["disk_bytes"], "CORE": 0, "NOFILE": 256, "MSGQUEUE": 0}
    wanted |= {"DATA": limits["memory_bytes"], "MEMLOCK": 0}
    if not limits["command"]:  # other interpreters reserve address space that they do not use
        wanted["AS"] = limits["memory_bytes"]
    if processes is not None:
        wanted["NPROC"] = processes
    for name, value in wanted.items():
        number = getattr(resource, f"RLIMIT_{name}")
        soft, hard = value if isinstance(value, tuple) else (value, value)
        _, most = resource.getrlimit(number)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(number, (soft, hard))


def drop_rights(user: int | None) -> None:
    """Become another user, and give up all capabilities for good."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    capset = _ARCHITECTURES[os.uname().machine][2]
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(_LIBC.syscall(capset, header, nothing), "capset")
    control("no_new_privileges", 1)


def filter_calls(has_namespaces: bool) -> None:
    """Refuse system calls that no limit counts, and without namespaces those that reach others (seccomp)."""
    architecture, _, _, always, without = _ARCHITECTURES[os.uname().machine]
    refused = always if has_namespaces else always + without

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse = step(give, 0x7FFF0000), step(give, 0x00050000 | 1)  # EPERM
    steps = [
        step(load, 4),
        step(equal, architecture, 1),
        refuse,
        step(load, 0),
        step(above, 0x40000000, len(refused) + 1),
    ]
    steps += [step(equal, number, len(refused) - place) for place, number in enumerate(refused)]
    steps += [allow, refuse]
    program = ctypes.create_string_buffer(b"".join(steps))
    header = struct.pack("=HxxxxxxQ", len(steps), ctypes.addressof(program))
    _check(_LIBC.prctl(_PRCTL["seccomp"], 2, ctypes.c_char_p(header), 0, 0), "seccomp")


def filter_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Confine this process to paths, and its signals to its descendants (Landlock 6, Linux 6.12)."""
    version = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 6:
        raise OSError(f"Landlock has version {max(version, 0)}, 6 is needed (Linux 6.12)")
    attributes = struct.pack("=QQQ", _EVERYTHING, 0b11, 0b11)
    rules = _check(_LIBC.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    devices = [f"/dev/{name}" for name in _DEVICES]
    for path, rights in [*((path, _READ) for path in readable), *((path, _EVERYTHING) for path in writable),
                         *((path, 0b110) for path in devices)]:  # fmt: skip
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights &= _EVERYTHING if os.path.isdir(path) else _OF_FILES
        _check(_LIBC.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0), f"landlock {path}")
        os.close(place)
    _check(_LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def unshare() -> None:
    """Enter new namespaces. The next child is the first process of the new tree."""
    flags = 0
    for flag in _NEW.values():
        flags |= flag
    _check(_LIBC.unshare(flags), "unshare of namespaces")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind, options)]
    _check(_LIBC.mount(texts[0], texts[1], texts[2], flags, texts[3]), f"mount {target}")


def _attributes(path: str, flags: int, recursive: bool) -> None:
    content = struct.pack("=QQQQ", flags, 0, 0, 0)
    at = 0x8000 if recursive else 0
    _check(_LIBC.syscall(_MOUNT_SETATTR, -100, path.encode(), at, content, len(content)), f"mount_setattr {path}")


def new_root(readable: Sequence[str]) -> None:
    """Make a new root: the readable paths read-only, a few devices, /proc if possible, and an empty /tmp."""
    places = (place for place in ("/mnt", "/media", "/srv", "/var", "/sys") if os.path.isdir(place))
    base = next(place for place in places if not any(f"{path}/".startswith(f"{place}/") for path in readable))
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    _mount("tmpfs", base, "tmpfs", _NOSUID, "size=1m,nr_inodes=16k,mode=755")
    for path in sorted(readable):
        inner = Path(f"{base}{os.path.abspath(path)}")
        if os.path.lexists(inner):  # within one that is there already
            continue
        inner.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(path):
            inner.symlink_to(os.readlink(path))
            continue
        _bind(path, inner)
    for name in _DEVICES:
        (Path(base) / "dev").mkdir(exist_ok=True)
        _bind(f"/dev/{name}", Path(base) / "dev" / name, read_only=False)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (Path(base) / "dev" / name).symlink_to(f"/proc/self/{target}")
    (Path(base) / "dev" / "shm").symlink_to("/tmp")
    for name in ("proc", "tmp"):
        (Path(base) / name).mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # a container hides parts of /proc, and the kernel then refuses a new one
        _mount("proc", f"{base}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(base)
    pivot_root = _ARCHITECTURES[os.uname().machine][1]
    _check(_LIBC.syscall(pivot_root, b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", 2), "umount of the old root")
    os.chdir("/")
    _attributes("/", 1, recursive=False)
    with contextlib.suppress(OSError):  # without /proc
        Path("/proc/sys/user/max_user_namespaces").write_text("0")


def _bind(path: str, inner: Path, read_only: bool = True) -> None:
    inner.mkdir(parents=True, exist_ok=True) if os.path.isdir(path) else inner.touch()
    _mount(os.path.realpath(path), str(inner), "", _BIND | _RECURSIVE)
    if read_only:
        _attributes(str(inner), 1 | _NOSUID, recursive=True)


def renew_tmp(size: int) -> None:
    """Mount an empty /tmp."""
    _LIBC.umount2(b"/tmp", 2)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={size},nr_inodes=64k,mode=1777")


def descendants() -> list[int]:
    """Return the living descendants of this process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in "ZX":
                parents.setdefault(int(parent), []).append(int(name))
    found, next_ones = [], [os.getpid()]
    while next_ones:
        next_ones = [child for parent in next_ones for child in parents.get(parent, [])]
        found += next_ones
    return found


def threads_of(user: int) -> int:
    """Return how many threads a user has."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def kill_all(whole_tree: bool) -> None:
    """Kill and reap all descendants: all other processes of the tree of processes, or those that are found."""
    while True:
        if whole_tree:
            _signal(-1, signal.SIGKILL)
        else:
            _kill_found()
        if not _reap(0 if whole_tree else os.WNOHANG):
            return


def _kill_found() -> None:
    """Stop all descendants before they are killed: one that is stopped starts no others."""
    stopped: set[int] = set()
    while new := set(descendants()) - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _reap(options: int) -> bool:
    """Reap children that have ended, and return whether there are others."""
    try:
        while os.waitpid(-1, options)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
