"""Entry point of a sandboxed process: drops all privileges, then runs the program. Standard library only.

Run as `python -I -S -B _sandbox_child.py CONTROL` with a JSON object on standard input (`rlloop.rewards.sandbox.Job`).
CONTROL is a pipe to which it writes "confined", or the reason why it cannot be. Only then does it run the program,
which has no access to the pipe.
"""

import ctypes
import json
import os
import re
import resource
import struct
import sys
import types

OUT_OF_MEMORY = 98
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEWUSER = 0x10000000
LANDLOCK = 444  # landlock_create_ruleset; add_rule and restrict_self follow; the same on every architecture
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
# Besides the interpreter's own folders: shared libraries, time zones, devices.
READABLE = "/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"

libc = ctypes.CDLL(None, use_errno=True)


class NotConfined(Exception):
    """This process cannot be confined; the message says why."""


def require(result: int, what: str) -> None:
    """Raise `NotConfined` if a C call failed."""
    if result:
        raise NotConfined(f"{what} failed: {os.strerror(ctypes.get_errno())}")


def confine(job: dict) -> None:
    # The kernel limits threads per user: root's not at all, others' in each namespace separately since 5.14.
    alone = libc.setresuid(1_000_000_000 + os.getpid(), -1, -1) == 0
    # Memory and environment of the starting process cannot be read by a user in a namespace of its own, by root
    # without capabilities, or under Landlock. Any of the three suffices; that reading fails is tested below.
    alone |= libc.unshare(CLONE_NEWUSER) == 0 and kernel() >= (5, 14)
    header = struct.pack("Ii", 0x20080522, 0)  # capset, version 3, with three empty sets
    require(libc.capset(header, struct.pack("6I", 0, 0, 0, 0, 0, 0)), "giving up capabilities")
    require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up further privileges")
    restrict_files(EXECUTE if job["command"] else 0)
    require(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "dying with the parent")
    if os.getppid() != job["parent"]:
        raise NotConfined("the process that started it is gone")
    require(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "closing /proc")  # no core files either
    for name, limit in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, job["cpu_seconds"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(name, (limit, limit))
    if alone:  # otherwise the limit would count the user's other processes
        resource.setrlimit(resource.RLIMIT_NPROC, (job["threads"], job["threads"]))
    code = bytes.fromhex(job["filter"])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    require(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0), "installing the seccomp filter")
    for name in ("environ", "mem"):
        try:
            os.close(os.open(f"/proc/{job['parent']}/{name}", os.O_RDONLY))
        except OSError:
            continue
        raise NotConfined("programs could read the memory and the environment of the process that starts them")


def kernel() -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, match.groups())) if match else ()


def restrict_files(more: int) -> None:
    """Landlock, if the kernel has it: only the interpreter's own files can be read, with `more` rights to them."""
    version = libc.syscall(LANDLOCK, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    handled = 0x1FFF | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15  # every access it knows
    rights = struct.pack("QQQ", handled, 3 * (version >= 4), 3 * (version >= 6))  # files, TCP, signals and sockets
    rules = libc.syscall(LANDLOCK, rights, ctypes.c_size_t(len(rights)), 0)
    if rules < 0:
        require(1, "Landlock")
    for path in {sys.base_prefix, sys.base_exec_prefix, *sys.path, *READABLE}:
        try:
            folder = os.open(path, os.O_PATH)
        except OSError:  # not there on every system
            continue
        access = more | READ_FILE | READ_DIR if os.path.isdir(path) else more | READ_FILE  # noqa: PTH112
        require(libc.syscall(LANDLOCK + 1, rules, 1, struct.pack("=Qi", access, folder), 0), f"Landlock over {path}")
        os.close(folder)
    require(libc.syscall(LANDLOCK + 2, rules, 0), "Landlock")
    os.close(rules)


def feed(text: str) -> None:
    """Make `text` the standard input for every way of reading it: input(), sys.stdin, open(0)."""
    file = os.memfd_create("stdin")
    with open(file, "wb", closefd=False) as writer:
        writer.write(text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115


def load_calls() -> types.ModuleType:
    """Import `_sandbox_calls` from this file's folder, which cannot be read after confinement."""
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120
    import _sandbox_calls

    del sys.path[0]
    return _sandbox_calls


def main() -> None:
    control = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.read())
    calls = load_calls() if job["channel"] else None
    feed(job["stdin"])
    sys.argv = ["program"]
    sys.setrecursionlimit(10_000)
    try:
        confine(job)
    except NotConfined as error:
        os.write(control, str(error).encode())
        os._exit(1)
    os.write(control, b"confined\n")
    if calls and job["is_test"]:
        os.write(control, json.dumps(calls.run_test(job["source"], *job["channel"])).encode() + b"\n")
        return
    os.close(control)
    if job["command"]:
        os.execve(job["command"][0], [*job["command"], job["source"]], {"LC_ALL": "C.UTF-8"})
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(job["source"], "<program>", "exec"), module.__dict__)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    if calls:
        calls.serve(module.__dict__, *job["channel"])


if __name__ == "__main__":
    main()
