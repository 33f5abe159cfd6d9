"""Attacks of hostile programs that succeed outside the sandbox and fail inside it, as root or as another user."""

import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from rlloop.rewards.seccomp import ARCHITECTURES, numbers, seccomp_filter
from tests.support import attacks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="system calls by their numbers on Linux, x86-64"
)
WORLD = Path(attacks.__file__).with_name("attack_world.py")
UNSHARE, LANDLOCK = str(attacks.NUMBERS["unshare"]), "444"
NOBODY = 65534


@cache
def world(mode: str, user: int, *denied: str) -> dict:
    """Outcome of each attack. Another user runs this same Python, mounted in a public folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        (place / "runs").mkdir()
        (place / "runs").chmod(0o777)
        command = [sys.executable, str(WORLD), str(place / "runs"), mode, *denied]
        environment = {"SECRET": "SECRET-of-the-parent", "PYTHONDONTWRITEBYTECODE": "1"}
        if user != os.getuid():
            (place / "python").mkdir()
            python = place / "python/bin" / Path(os.path.realpath(sys.executable)).name
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if "site-packages" in path)
            identity = f"setpriv --reuid={user} --regid={user} --clear-groups"
            script = f'mount --bind {sys.base_prefix} {place}/python && exec {identity} {python} "$@"'
            command = ["unshare", "-m", "sh", "-c", script, "sh", *command[1:]]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=800)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def others() -> list[int]:
    """This user, and where that is root, one who is not."""
    able = os.getuid() == 0 and shutil.which("setpriv") and shutil.which("unshare")
    return [os.getuid(), NOBODY] if able else [os.getuid()]


@pytest.mark.parametrize("user", others())
@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_inside_an_attack_is_denied_and_harms_nobody(name, user):
    line, effects, _ = world("closed", user)["attacks"][name]
    assert line.startswith("denied: ")
    assert any(word in line for word in ("Errno 1]", "Errno 13]", "Errno 38]", "gaierror", "not allowed")), line
    assert effects == []


@pytest.mark.parametrize("user", others())
@pytest.mark.parametrize("name", attacks.EFFECTIVE)
def test_outside_the_same_attack_works(name, user):
    line, effects, _ = world("open", user)["attacks"][name]
    if "Errno 95]" in line or (os.cpu_count() == 1 and name == "sched_setaffinity"):
        pytest.skip(f"not on this machine: {line}")  # a file system without extended attributes
    assert effects != [], line


@pytest.mark.parametrize("user", others())
def test_without_namespaces_something_else_keeps_memory_apart_or_nothing_runs(user):
    """A container's profile that denies `unshare`, on a kernel with Landlock and on one without."""
    for denied in ([UNSHARE], [UNSHARE, LANDLOCK]):
        report = world("closed", user, *denied)
        assert report["user"] == user
        if "refused" in report:
            assert "cannot confine a program" in report["refused"]
            assert "seccomp profile that allows `unshare`" in report["refused"]
        for name, (line, effects, _) in report["attacks"].items():
            assert effects == [], name
            assert line == "no line" if "refused" in report else line.startswith("denied: ")
    assert ("refused" in world("closed", user, UNSHARE, LANDLOCK)) == (user != 0)


# ------------------------------------------------------------------------------------------------ the filter, by itself


def judged(code: bytes, machine: str, number: int, *arguments: int) -> int:
    """Result of a classic BPF program, which has only jumps, loads and comparisons."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, ARCHITECTURES.get(machine, 0x40000003), 0, *padded)
    program, place, word = list(struct.iter_unpack("<HBBI", code)), 0, 0
    while True:
        operation, yes, no, value = program[place]
        if operation == 0x06:
            return value
        if operation == 0x20:
            [word] = struct.unpack_from("<I", data, value)
            place += 1
        else:
            true = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[operation]
            place += 1 + (yes if true else no)


ALLOW, KILL = 0x7FFF0000, 0x80000000
WIDE = 1 << 32  # the kernel reads the low half of such an argument
CASES = [
    ("openat", [0, 0, 0], True), ("openat", [0, 0, 0o2000000], True), ("openat", [0, 0, 1], False),
    ("openat", [0, 0, 2], False), ("openat", [0, 0, 0o100], False), ("openat", [0, 0, 0o1000], False),
    ("openat", [0, 0, WIDE | 1], False), ("openat", [0, 0, 0o20000], False), ("fcntl", [1, 1, 0], True),
    ("fcntl", [1, 4, 0o4000], True), ("fcntl", [1, 4, 0o20000], False), ("fcntl", [1, 8, 5], False),
    ("fcntl", [1, 10, 9], False), ("fcntl", [1, 15, 0], False), ("fcntl", [1, WIDE | 8, 5], False),
    ("fcntl", [1, 1024, 0], False), ("ioctl", [0, 0x5401, 0], True), ("ioctl", [0, 0x5412, 0], False),
    ("ioctl", [0, 0x8901, 0], False), ("ioctl", [0, WIDE | 0x8901, 0], False), ("prctl", [15, 0], True),
    ("prctl", [1, 0], False), ("prctl", [4, 1], False), ("clone", [0x3D0F00], True), ("clone", [0x7D0F00], True),
    ("clone", [17], False), ("clone", [0x3D0F00 | 0x10000000], False), ("clone", [0x3D0F00 | 0x2000], False),
    ("clone", [0x3C0F00], False), ("prlimit64", [0, 7, 0, 5], True), ("prlimit64", [5, 7, 0, 5], False),
    ("prlimit64", [0, 7, 4, 5], False), ("prlimit64", [0, 7, WIDE, 5], False), ("read", [0, 0, 0], True),
]  # fmt: skip
DENIED = {  # by number, on each architecture
    "x86_64": {name: number for name, number in attacks.NUMBERS.items() if name not in numbers("x86_64")},
    "aarch64": attacks.table("""
        kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 ptrace 117 process_vm_readv
        270 kcmp 272 setpriority 140 sched_setaffinity 122 ioprio_set 30 setxattr 5 lsetxattr 6 fsetxattr 7
        removexattr 14 fchmodat 53 fchmodat2 452 utimensat 88 unlinkat 35 mkdirat 34 linkat 37 renameat 38
        renameat2 276 truncate 45 ftruncate 46 fchmod 52 fchownat 54 fchown 55 socket 198 socketpair 199
        execve 221 execveat 281 unshare 97 setns 268 mount 40 bpf 280 perf_event_open 241 keyctl 219
        memfd_create 279 seccomp 277 userfaultfd 282 io_uring_setup 425 clone3 435 timer_create 107 mknodat 33
        symlinkat 36 setrlimit 164 sched_setscheduler 119 sched_setattr 274 personality 92 flock 32
    """),
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_answers_by_number_argument_and_architecture(machine):
    code, allowed = seccomp_filter(machine), numbers(machine)
    for name, arguments, good in CASES:
        assert (judged(code, machine, allowed[name], *arguments) == ALLOW) == good, (name, arguments)
    for name, number in DENIED[machine].items():
        assert judged(code, machine, number) not in (ALLOW, KILL), name
    free = set(allowed.values())
    for number in range(1024):
        assert (judged(code, machine, number) == ALLOW) <= (number in free), number
    assert judged(code, "another", allowed["read"]) == KILL
    other = next(each for each in ARCHITECTURES if each != machine)
    assert judged(code, other, allowed["read"]) == KILL
    x32 = judged(code, machine, 0x40000000 | allowed["write"])
    assert x32 == KILL if machine == "x86_64" else x32 != ALLOW


def test_the_tables_numbers_are_the_systems_own():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    generic = Path("/usr/include/asm-generic/unistd.h")
    if not (header.exists() and generic.exists()):
        pytest.skip("the kernel's headers are not installed")
    for machine, file in (("x86_64", header), ("aarch64", generic)):
        known = {}
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) >= 3 and words[0] == "#define" and words[1].startswith("__NR") and words[2].isdigit():
                known[words[1].removeprefix("__NR3264_").removeprefix("__NR_")] = int(words[2])
        for name, number in numbers(machine).items():
            assert known.get(name, known.get(name.removeprefix("new"))) == number, (machine, name)
