"""Hostile programs. Each is tried by `attack_world.py` inside of the sandbox and, to see that it is one, outside of it.

VICTIM is the process id of another process of the same user, PARENT of the one that started the program, FOLDER a
folder with the file `kept`, `call(name, ...)` a system call that raises OSError. An attack that is denied raises.
"""


def table(text: str) -> dict[str, int]:
    words = text.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


# On x86-64, for calls that Python has no function for.
NUMBERS = table("""
    kill 62 tkill 200 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 pidfd_open 434 pidfd_send_signal 424
    pidfd_getfd 438 ptrace 101 process_vm_readv 310 process_vm_writev 311 process_madvise 440 process_mrelease 448
    kcmp 312 prctl 157 prlimit64 302 setrlimit 160 setpriority 141 ioprio_set 251 sched_setattr 314
    sched_setscheduler 144 sched_setparam 142 move_pages 279 migrate_pages 256 set_mempolicy 238 fcntl 72 ioctl 16
    fchmodat2 452 fchmodat 268 setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197 lremovexattr 198
    fremovexattr 199 setxattrat 463 futimesat 261 utime 132 utimes 235 utimensat 280 renameat2 316 openat2 437
    creat 85 truncate 76 ftruncate 77 fallocate 285 linkat 265 symlinkat 266 mknodat 259 flock 73 chroot 161
    unshare 272 setns 308 mount 165 move_mount 429 open_tree 428 fsopen 430 mount_setattr 442 pivot_root 155 bpf
    321 perf_event_open 298 keyctl 250 add_key 248 request_key 249 userfaultfd 323 io_uring_setup 425
    io_uring_enter 426 io_uring_register 427 memfd_create 319 memfd_secret 447 seccomp 317 personality 135
    modify_ldt 154 arch_prctl 158 socket 41 socketpair 53 connect 42 sendto 44 inotify_init1 294 fanotify_init 300
    signalfd4 289 timer_create 222 mq_open 240 shmget 29 msgget 68 semget 64 clone 56 clone3 435 fork 57 vfork 58
    execve 59 execveat 322 setsid 112 setpgid 109 setuid 105 setresuid 117 setgroups 116 capset 126
    name_to_handle_at 303 open_by_handle_at 304 sched_setaffinity 203 vmsplice 278 splice 275
    landlock_restrict_self 446 clock_settime 227 adjtimex 159 reboot 169 swapon 167 kexec_load 246 init_module 175
    quotactl 179 acct 163 syslog 103 mlock 149 mlockall 151 sync 162 syncfs 306 futex_waitv 449 cachestat 451
""")

PRELUDE = f"""
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys, time
NUMBERS = {NUMBERS!r}
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    ctypes.set_errno(0)
    result = libc.syscall(NUMBERS[name], *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def info(number):  # siginfo_t of a queued signal
    return ctypes.create_string_buffer(struct.pack("iiiiii", number, 0, -1, 0, os.getpid(), os.getuid()), 128)
def own(descriptor, command, who, number):  # who is told of input on a pipe, and by which signal
    fcntl.fcntl(descriptor, command, who)
    fcntl.fcntl(descriptor, 10, number)  # F_SETSIG
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC)
"""

SIGNALS = {  # each ends the victim where it works
    "kill": "os.kill(VICTIM, 9)",
    "kill of a group": "os.killpg(os.getpgid(VICTIM), 9)",
    "tkill": "call('tkill', VICTIM, 9)",
    "tgkill": "call('tgkill', VICTIM, VICTIM, 9)",
    "rt_sigqueueinfo": "call('rt_sigqueueinfo', VICTIM, 15, info(15))",
    "rt_tgsigqueueinfo": "call('rt_tgsigqueueinfo', VICTIM, VICTIM, 15, info(15))",
    "pidfd_send_signal": "call('pidfd_send_signal', os.pidfd_open(VICTIM), 9, None, 0)",
    "F_SETOWN": "r, w = os.pipe(); own(r, 8, VICTIM, 9); os.write(w, b'x'); time.sleep(0.05)",
    "F_SETOWN_EX": "r, w = os.pipe(); own(r, 15, struct.pack('ii', 1, VICTIM), 9); os.write(w, b'x'); time.sleep(0.05)",
    "F_SETOWN of a group": "r, w = os.pipe(); own(r, 8, -VICTIM, 9); os.write(w, b'x'); time.sleep(0.05)",
    "prlimit of the victim": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0)); time.sleep(0.05)",
    "ptrace": "call('ptrace', 16, VICTIM, 0, 0); os.waitpid(VICTIM, 0); call('ptrace', 8, VICTIM, 0, 0)",
}
FILES = {  # each changes FOLDER where it works
    "write": "open(FOLDER + '/kept', 'w')",
    "append": "open(FOLDER + '/kept', 'a').write('x')",
    "read and write": "os.write(os.open(FOLDER + '/kept', os.O_RDWR), b'x')",
    "truncate on open": "os.open(FOLDER + '/kept', os.O_RDONLY | os.O_TRUNC)",
    "create": "os.open(FOLDER + '/new', os.O_RDONLY | os.O_CREAT)",
    "creat": "call('creat', os.fsencode(FOLDER + '/new'), 0o600)",
    "nameless": """
file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR)
call('linkat', -100, f'/proc/self/fd/{file}'.encode(), -100, os.fsencode(FOLDER + '/new'), 0x400)""",
    "openat2": "call('openat2', -100, os.fsencode(FOLDER + '/new'), struct.pack('QQQ', os.O_CREAT | 2, 0o600, 0), 24)",
    "truncate": "os.truncate(FOLDER + '/kept', 0)",
    "unlink": "os.unlink(FOLDER + '/kept')",
    "rename": "os.rename(FOLDER + '/kept', FOLDER + '/new')",
    "renameat2": "call('renameat2', -100, os.fsencode(FOLDER + '/kept'), -100, os.fsencode(FOLDER + '/new'), 1)",
    "link": "os.link(FOLDER + '/kept', FOLDER + '/new')",
    "symlink": "os.symlink('/etc', FOLDER + '/new')",
    "mkdir": "os.mkdir(FOLDER + '/new')",
    "mkfifo": "os.mkfifo(FOLDER + '/new')",
    "chmod": "os.chmod(FOLDER + '/kept', 0o666)",
    "fchmod": "os.fchmod(os.open(FOLDER + '/kept', os.O_RDONLY), 0o666)",
    "fchmodat2": "call('fchmodat2', -100, os.fsencode(FOLDER + '/kept'), 0o666, 0)",
    "setxattr": "os.setxattr(FOLDER + '/kept', 'user.a', b'x')",
    "lsetxattr": "call('lsetxattr', os.fsencode(FOLDER + '/kept'), b'user.a', b'x', 1, 0)",
    "fsetxattr": "call('fsetxattr', os.open(FOLDER + '/kept', os.O_RDONLY), b'user.a', b'x', 1, 0)",
    "removexattr": "os.removexattr(FOLDER + '/kept', 'user.kept')",
    "lremovexattr": "call('lremovexattr', os.fsencode(FOLDER + '/kept'), b'user.kept')",
    "fremovexattr": "call('fremovexattr', os.open(FOLDER + '/kept', os.O_RDONLY), b'user.kept')",
    "utime": "call('utime', os.fsencode(FOLDER + '/kept'), struct.pack('qq', 1, 1))",
    "utimes": "call('utimes', os.fsencode(FOLDER + '/kept'), struct.pack('qqqq', 1, 0, 1, 0))",
    "futimesat": "call('futimesat', -100, os.fsencode(FOLDER + '/kept'), struct.pack('qqqq', 1, 0, 1, 0))",
    "utimensat": "os.utime(FOLDER + '/kept', (1, 1))",
}
READING = {  # each prints the victim's or the parent's SECRET where it works
    "environment of the parent": "print(open(f'/proc/{PARENT}/environ').read())",
    "environment of the victim": "print(open(f'/proc/{VICTIM}/environ').read())",
    "memory of the victim": """
for line in open(f'/proc/{VICTIM}/maps'):
    if '[stack]' in line or '[heap]' in line:
        low, high = (int(end, 16) for end in line.split()[0].split('-'))
        with open(f'/proc/{VICTIM}/mem', 'rb') as memory:
            memory.seek(low)
            print(memory.read(high - low).decode('latin1'))""",
    "process_vm_readv": """
low, high = [(int(a, 16), int(b, 16)) for a, b in (line.split()[0].split('-') for line in open(f'/proc/{VICTIM}/maps')
             if '[stack]' in line)][0]
room = ctypes.create_string_buffer(high - low)
mine, theirs = struct.pack('QQ', ctypes.addressof(room), high - low), struct.pack('QQ', low, high - low)
call('process_vm_readv', VICTIM, mine, 1, theirs, 1, 0)
print(room.raw.decode('latin1'))""",
    "files of the victim": "print(open(f'/proc/{VICTIM}/fd/0').read())",
    "pidfd_getfd": "print(os.read(call('pidfd_getfd', os.pidfd_open(VICTIM), 0, 0), 99).decode())",
}
HARM = {  # each changes how the victim runs
    "setpriority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 15)",
    "sched_setaffinity": "os.sched_setaffinity(VICTIM, {max(os.sched_getaffinity(VICTIM))})",
    "sched_setscheduler": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))",
    "sched_setattr": "call('sched_setattr', VICTIM, struct.pack('IIQiIQQQ', 48, 0, 0, 15, 0, 0, 0, 0), 0)",
    "prlimit": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (3, 3))",
    "ioprio_set": "call('ioprio_set', 1, VICTIM, 3 << 13)",
}
# Denied whatever the arguments are: calls that reach further than a computation.
WHOLE = """
    kcmp process_madvise process_mrelease move_pages migrate_pages set_mempolicy io_uring_setup io_uring_enter
    io_uring_register userfaultfd bpf perf_event_open keyctl add_key request_key memfd_create memfd_secret seccomp
    personality modify_ldt arch_prctl unshare setns mount move_mount open_tree fsopen mount_setattr pivot_root
    chroot inotify_init1 fanotify_init signalfd4 mq_open setsid setpgid setuid setresuid setgroups capset
    name_to_handle_at open_by_handle_at flock fallocate vmsplice splice landlock_restrict_self clock_settime
    adjtimex reboot swapon kexec_load init_module quotactl acct syslog mlock mlockall sync syncfs setxattrat
    futex_waitv cachestat pidfd_open
"""
CALLS = {
    "ioctl FIOSETOWN": "fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', VICTIM))",
    "ioctl SIOCSPGRP": "fcntl.ioctl(os.pipe()[0], 0x8902, struct.pack('i', VICTIM))",
    "ioctl FIOASYNC": "fcntl.ioctl(os.pipe()[0], 0x5452, struct.pack('i', 1))",
    "ioctl TIOCSTI": "fcntl.ioctl(0, 0x5412, b'x')",
    "ioctl with a wide command": "call('ioctl', 0, (1 << 32) | 0x5412, b'x')",
    "open with O_ASYNC": "os.open(sys.executable if os.path.exists(sys.executable) else '/dev/null', os.O_ASYNC)",
    "fcntl F_SETLEASE": "fcntl.fcntl(os.open('/dev/null', 0), 1024, 0)",
    "fcntl F_NOTIFY": "fcntl.fcntl(os.open('/usr', 0), 1026, 2)",
    "fcntl F_SETLK": "fcntl.lockf(os.open('/dev/null', 0), fcntl.LOCK_SH)",
    "fcntl F_SETPIPE_SZ": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "fcntl with a wide command": "call('fcntl', os.pipe()[0], (1 << 32) | 8, VICTIM)",
    "prctl PDEATHSIG": "call('prctl', 1, 0, 0, 0, 0)",
    "prctl DUMPABLE": "call('prctl', 4, 1, 0, 0, 0)",
    "prctl with a wide option": "call('prctl', (1 << 32) | 1, 0, 0, 0, 0)",
    "prctl SUBREAPER": "call('prctl', 36, 1, 0, 0, 0)",
    "prctl PTRACER": "call('prctl', 0x59616d61, -1, 0, 0, 0)",
    "prctl SECCOMP": "call('prctl', 22, 1, 0, 0, 0)",
    "setrlimit": "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))",
    "prlimit with limits": "call('prlimit64', 0, 0, struct.pack('QQ', 9, 9), None)",
    "prlimit of the parent": "call('prlimit64', PARENT, 7, None, bytes(16))",
    "fork": "os.fork()",
    "raw fork": "call('fork')",
    "vfork": "call('vfork')",
    "clone as a fork": "call('clone', 17, 0, 0, 0, 0)",
    "clone with namespaces": "call('clone', 0x10000000 | 0x10f00, 0, 0, 0, 0)",
    "clone3": "call('clone3', bytes(88), 88)",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "execve": "os.execv('/bin/true', ['true'])",
    "execveat": "call('execveat', -100, b'/bin/true', None, None, 0)",
    "socket": "socket.socket()",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "netlink": "socket.socket(socket.AF_NETLINK)",
    "socketpair": "socket.socketpair()",
    "resolver": "socket.getaddrinfo('example.com', 80)",
    "shared memory": "call('shmget', 0, 4096, 0o1600)",
    "messages": "call('msgget', 0, 0o1600)",
    "semaphores": "call('semget', 0, 1, 0o1600)",
    "timer for another thread": "call('timer_create', 0, bytes(64), bytes(8))",
    **{name: f"call({name!r}, 0, 0, 0, 0, 0)" for name in WHOLE.split()},
}
EFFECTIVE = {**SIGNALS, **FILES, **READING, **HARM}
ATTACKS = {**EFFECTIVE, **CALLS}


def program(attacks: dict[str, str], victim: int, parent: int, folder: str) -> str:
    """Tries them one after the other and prints what came of each, a line with its name at the end."""
    return f"""{PRELUDE}
VICTIM, PARENT, FOLDER = {victim}, {parent}, {folder!r}
for name, source in {attacks!r}.items():
    try:
        exec(source)
    except BaseException as error:
        print(f"denied: {{type(error).__name__}}: {{error}}: {{name}}", flush=True)
    else:
        print(f"went through: {{name}}", flush=True)
"""
