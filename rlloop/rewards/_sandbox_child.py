"""The first code of a sandboxed process: gives everything up, then runs the program. Standard library only.

Run as `python -I -S -B _sandbox_child.py` with a JSON object on standard input: {"source", "stdin", "cpu_seconds",
"memory_bytes"}. Linux on x86-64 or aarch64; elsewhere it exits with 97 before it runs anything.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

UNSUPPORTED, OUT_OF_MEMORY = 97, 98

# System calls that a pure computation does not need. Denied with EPERM: new processes, other programs, the network,
# other processes, the kernel's administration, and every change to the file system.
DENIED = {
    "x86_64": (
        "fork 57 vfork 58 execve 59 execveat 322 clone3 435 "
        "socket 41 connect 42 accept 43 sendto 44 sendmsg 46 bind 49 listen 50 socketpair 53 accept4 288 sendmmsg 307 "
        "io_uring_setup 425 io_uring_enter 426 io_uring_register 427 "
        "kill 62 tkill 200 tgkill 234 rt_sigqueueinfo 129 pidfd_open 434 pidfd_send_signal 424 pidfd_getfd 438 "
        "ptrace 101 process_vm_readv 310 process_vm_writev 311 prlimit64 302 setrlimit 160 "
        "unshare 272 setns 308 mount 165 umount2 166 chroot 161 pivot_root 155 bpf 321 perf_event_open 298 keyctl 250 "
        "add_key 248 request_key 249 setuid 105 setgid 106 setreuid 113 setregid 114 setresuid 117 setresgid 119 "
        "creat 85 truncate 76 ftruncate 77 rename 82 renameat 264 renameat2 316 link 86 linkat 265 symlink 88 "
        "symlinkat 266 unlink 87 unlinkat 263 mkdir 83 mkdirat 258 rmdir 84 mknod 133 mknodat 259 chmod 90 fchmod 91 "
        "fchmodat 268 chown 92 fchown 93 lchown 94 fchownat 260 utime 132 utimes 235 utimensat 280 setxattr 188 "
        "openat2 437 shmget 29 shmat 30 msgget 68 semget 64 mq_open 240 personality 135"
    ),
    "aarch64": (
        "execve 221 execveat 281 clone3 435 "
        "socket 198 connect 203 accept 202 sendto 206 sendmsg 211 bind 200 listen 201 socketpair 199 accept4 242 "
        "sendmmsg 269 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 "
        "kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138 pidfd_open 434 pidfd_send_signal 424 pidfd_getfd 438 "
        "ptrace 117 process_vm_readv 270 process_vm_writev 271 prlimit64 261 setrlimit 164 "
        "unshare 97 setns 268 mount 40 umount2 39 chroot 51 pivot_root 41 bpf 280 perf_event_open 241 keyctl 219 "
        "add_key 217 request_key 218 setuid 146 setgid 144 setreuid 145 setregid 143 setresuid 147 setresgid 149 "
        "truncate 45 ftruncate 46 renameat 38 renameat2 276 linkat 37 symlinkat 36 unlinkat 35 mkdirat 34 mknodat 33 "
        "fchmod 52 fchmodat 53 fchown 55 fchownat 54 utimensat 88 setxattr 5 "
        "openat2 437 shmget 194 shmat 196 msgget 186 semget 190 mq_open 180 personality 92"
    ),
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
OPEN = {"x86_64": {"open": (2, 1), "openat": (257, 2)}, "aarch64": {"openat": (56, 2)}}  # number, index of the flags
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_THREAD = 0x00010000


def seccomp_filter(machine: str) -> bytes:
    """A classic BPF program over `struct seccomp_data` (number at 0, architecture at 4, arguments from 16, 8 each)."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, ARCHITECTURE[machine]),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
    ]
    if machine == "x86_64":
        program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # the x32 numbers
    words = DENIED[machine].split()
    for name, number in zip(words[::2], words[1::2], strict=True):
        # clone3 hides its flags in memory; ENOSYS makes the C library use clone, whose flags can be read.
        program += [(equal, 0, 1, int(number)), (answer, 0, 0, enosys if name == "clone3" else eperm)]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for number, index in OPEN[machine].values():
        program += [(equal, 0, 4, number), (load, 0, 0, 16 + 8 * index), (any_bit, 0, 1, writes), (answer, 0, 0, eperm)]
        program += [(answer, 0, 0, allow)]
    program += [(equal, 0, 4, CLONE[machine]), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD), (answer, 0, 0, eperm)]
    program += [(answer, 0, 0, allow), (answer, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def confine(cpu_seconds: int, memory_bytes: int) -> None:
    machine = platform.machine()
    libc = ctypes.CDLL(None, use_errno=True)
    # Neither a user in a namespace of its own (CLONE_NEWUSER, where the kernel grants one), nor root without
    # capabilities, may read memory or environment of the process that started this one. capset with a version 3 header
    # and three empty sets.
    libc.unshare(0x10000000)
    header = struct.pack("Ii", 0x20080522, 0)
    if libc.capset(header, struct.pack("6I", 0, 0, 0, 0, 0, 0)):
        os._exit(UNSUPPORTED)
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the parent
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: neither core files nor a readable /proc entry
    for name, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(name, (limit, limit))
    code = seccomp_filter(machine)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0):
        os._exit(UNSUPPORTED)


def feed(text: str) -> None:
    """Makes `text` the standard input, however a program reads it: input(), sys.stdin, open(0)."""
    file = os.memfd_create("stdin")
    with open(file, "wb", closefd=False) as writer:
        writer.write(text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURE:
        os._exit(UNSUPPORTED)
    feed(job["stdin"])
    code = compile(job["source"], "<program>", "exec")
    sys.argv = ["program"]
    sys.setrecursionlimit(10_000)
    confine(job["cpu_seconds"], job["memory_bytes"])
    try:
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
