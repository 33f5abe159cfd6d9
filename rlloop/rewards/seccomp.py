"""Allow-list of system calls for sandboxed programs, as a seccomp filter. Calls that are not listed are denied.

A computation needs memory, threads, time, signal handlers of its own, and files and pipes to read from. Calls whose
arguments could do more (fcntl, ioctl, prctl, clone, ...) are allowed for listed arguments only. All others return
EPERM, or ENOSYS for those newer than `YOUNG`, so that a C library falls back to an older call. A call in another
architecture's numbering, or in x32's, ends the process.

Numbers: Linux's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import struct
from typing import Literal

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
X32 = 0x40000000  # the bit that its numbers have
YOUNG = 424  # from here on, all architectures have the same numbers

# name, number on x86-64, number on aarch64 (-: the architecture has no such call)
ALLOWED = """
    read 0 63                write 1 64               readv 19 65              writev 20 66
    pread64 17 67            preadv 295 69            lseek 8 62               close 3 57
    stat 4 -                 lstat 6 -                fstat 5 80               newfstatat 262 79
    statx 332 291            access 21 -              faccessat 269 48         faccessat2 439 439
    readlink 89 -            readlinkat 267 78        getdents64 217 61        getcwd 79 17
    statfs 137 43            fstatfs 138 44           dup 32 23                dup2 33 -
    dup3 292 24              pipe 22 -                pipe2 293 59             poll 7 -
    ppoll 271 73             select 23 -              pselect6 270 72          epoll_create1 291 20
    epoll_ctl 233 21         epoll_wait 232 -         epoll_pwait 281 22       mmap 9 222
    mprotect 10 226          munmap 11 215            mremap 25 216            brk 12 214
    madvise 28 233           exit 60 93               exit_group 231 94        futex 202 98
    set_robust_list 273 99   rseq 334 293             sched_yield 24 124
    sched_getaffinity 204 123  getcpu 309 168         rt_sigaction 13 134      rt_sigprocmask 14 135
    rt_sigreturn 15 139      rt_sigpending 127 136    rt_sigtimedwait 128 137  rt_sigsuspend 130 133
    sigaltstack 131 132      pause 34 -               alarm 37 -               getitimer 36 102
    setitimer 38 103         restart_syscall 219 128  nanosleep 35 101         clock_nanosleep 230 115
    clock_gettime 228 113    clock_getres 229 114     gettimeofday 96 169      time 201 -
    times 100 153            getrusage 98 165         getrlimit 97 163         sysinfo 99 179
    uname 63 160             getrandom 318 278        getpid 39 172            getppid 110 173
    gettid 186 178           getuid 102 174           geteuid 107 175          getgid 104 176
    getegid 108 177          getresuid 118 148        getresgid 120 150        getgroups 115 158
    open 2 -                 openat 257 56            fcntl 72 25              ioctl 16 29
    prctl 157 167            clone 56 220             prlimit64 302 261
"""

# Beside those, to become another language's interpreter, and what its start asks for.
STARTING = """
    execve 59 221            arch_prctl 158 -         set_tid_address 218 96   getpgrp 111 -
    getpgid 121 155          eventfd2 290 19
"""

# A check: a 32-bit word of an argument against a value. Both architectures are little-endian: the low word comes first.
Check = tuple[int, Literal["is", "lacks", "has"], int]
LOW, HIGH = 0, 4


def argument(index: int, half: int = LOW) -> int:
    """Offset of a half of an argument in `struct seccomp_data`."""
    return 16 + 8 * index + half


O_ASYNC = 0o20000
WRITES = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | O_ASYNC  # O_WRONLY, O_RDWR (and O_TMPFILE), O_CREAT, O_TRUNC, O_APPEND
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX = (
    *(0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421),
    *(0x5450, 0x5451),
)
PR_SET_NAME, PR_GET_NAME, PR_SET_VMA = 15, 16, 0x53564D41  # the last one names memory
CLONE_THREAD, THREAD_FLAGS = 0x00010000, 0x007D0F00  # pthread_create's, of glibc and musl

# Alternatives by name: a call is allowed if all checks of one of them hold.
ARGUMENTS: dict[str, list[list[Check]]] = {
    "open": [[(argument(1), "lacks", WRITES)]],
    "openat": [[(argument(2), "lacks", WRITES)]],
    "fcntl": [
        *([(argument(1), "is", command)] for command in (F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC)),
        [(argument(1), "is", F_SETFL), (argument(2), "lacks", O_ASYNC)],
    ],
    "ioctl": [
        [(argument(1), "is", command)]
        for command in (TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX)
    ],
    "prctl": [[(argument(0), "is", option)] for option in (PR_SET_NAME, PR_GET_NAME, PR_SET_VMA)],
    "clone": [[(argument(0), "has", CLONE_THREAD), (argument(0), "lacks", 0xFFFFFFFF & ~THREAD_FLAGS)]],
    "prlimit64": [[(argument(0), "is", 0), (argument(2, LOW), "is", 0), (argument(2, HIGH), "is", 0)]],  # reads its own
}

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, value
LOAD, EQUAL, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050000 | 38


def numbers(machine: str, *, starts: bool = False) -> dict[str, int]:
    """Numbers of the allowed calls by name; `starts`: with those that start an interpreter."""
    words, column = (ALLOWED + STARTING * starts).split(), 1 + list(ARCHITECTURES).index(machine)
    rows = [words[start : start + 3] for start in range(0, len(words), 3)]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _alternative(checks: list[Check]) -> list[Instruction]:
    """Allow if all `checks` hold, else continue with the next instruction."""
    program: list[Instruction] = []
    for index, (offset, test, value) in enumerate(checks):
        out = 2 * (len(checks) - index - 1) + 1  # past the other checks and the answer
        operation = EQUAL if test == "is" else ANY_BIT
        jumps = (out, 0) if test == "lacks" else (0, out)
        program += [(LOAD, 0, 0, offset), (operation, *jumps, value)]
    return [*program, (ANSWER, 0, 0, ALLOW)]


def seccomp_filter(machine: str, *, starts: bool = False) -> bytes:
    """A classic BPF program over `struct seccomp_data`: number at 0, architecture at 4, arguments from 16, 8 each.

    `starts`: the process may replace itself by another program, which the same filter binds.
    """
    program: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (ANSWER, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32), (ANSWER, 0, 0, KILL)]
    for name, number in numbers(machine, starts=starts).items():
        body = [one for checks in ARGUMENTS.get(name, [[]]) for one in _alternative(checks)]
        if name in ARGUMENTS:
            body.append((ANSWER, 0, 0, EPERM))
        program += [(EQUAL, 0, len(body), number), *body]
    program += [(AT_LEAST, 0, 1, YOUNG), (ANSWER, 0, 0, ENOSYS), (ANSWER, 0, 0, EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
