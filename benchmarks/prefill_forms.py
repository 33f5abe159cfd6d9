"""Throw-away: forms of prefill attention side by side. Bits against the kernel of every GPU, TFLOP/s beside FlashAttention 3.

    python sweep_prefill.py [--only NAME ...] [--kill 110]

Every form runs in a process of its own (all compile at once); a GPU is timed by one process at a time (a file lock).
"""
import argparse, fcntl, json, os, statistics, subprocess, sys, tempfile, time

FADES = [("return following, top, total, sums * gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]", "return following, top, total, sums")]
NOMAX = [("highest = gl.maximum(top, gl.max(scores, 1) * scale)", "highest = gl.maximum(top, top * 0.0 + 3.0)")]
NOEXP = [("masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -highest[:, None]))", "masses = gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -highest[:, None])")]
NOSUM = [("total = gl.fma(total, fade, gl.sum(masses, 1))", "total = gl.fma(total, fade, fade)")]
FORMS = {"232 registers": dict(REGISTERS=232), "240 registers": dict(REGISTERS=240)}
TIMED = [  # heads, groups, width, sequences, queries of each, keys before them, page (0: in one piece)
    (32, 8, 128, 16, 1024, 0, 0), (32, 8, 128, 4, 4096, 0, 0), (32, 8, 128, 4, 8192, 0, 0), (32, 8, 128, 1, 32768, 0, 0),
    (32, 8, 128, 4, 2048, 2048, 16),
]
CHECKED = [  # heads, groups, width, counts, contexts, page, type
    (32, 8, 128, [1024, 8192, 333, 1, 4097], [0] * 5, 0, "bfloat16"),
    (32, 8, 128, [32751], [0], 0, "bfloat16"),
    (32, 8, 128, [2000, 77, 1, 1025, 64], [6192, 1500, 3000, 1024, 1023], 16, "bfloat16"),
    (14, 2, 64, [77, 1, 600, 64, 2090, 1025], [5, 1500, 0, 1023, 70, 1024], 64, "bfloat16"),
    (16, 1, 128, [77, 1, 600, 64, 2090], [5, 1500, 0, 1023, 70], 32, "float16"),
    (32, 8, 128, [512, 100, 1, 900], [0] * 4, 0, "bfloat16"),
]
REFERENCE = "/tmp/sweep_prefill_reference.pt"


def given(heads, groups, width, counts, contexts, page, dtype, seed):
    import torch
    g = torch.Generator("cuda").manual_seed(seed)
    full = contexts is None
    contexts = contexts or [0] * len(counts)
    ends = [a + b for a, b in zip(counts, contexts)]
    start = torch.tensor([0, *counts], device="cuda").cumsum(0)
    if page:
        pages = -(-max(ends) // page)
        starts = torch.randperm(len(counts) * pages, device="cuda", generator=g).view(len(counts), pages) * page
        size, room = page, len(counts) * pages * page
    else:
        starts, size, room = start[:-1, None], max(counts), sum(counts)
    k, v = (torch.randn(room, groups, width, device="cuda", generator=g).to(getattr(torch, dtype)) for _ in "kv")
    q = (2 * torch.randn(sum(counts), heads, width, device="cuda", generator=g)).to(k.dtype)
    return (q, k, v, start, torch.tensor(contexts, device="cuda"), starts, size, width**-0.5), not full


def child(name, gpu, results):
    began = time.time()
    import torch, triton.language as tl
    from rlloop.numerics.kernels.triton import prefill_loads, launch

    def put(m, k, v):
        old = getattr(m, k)
        setattr(m, k, tl.constexpr(type(old.value)(v)) if isinstance(old, tl.constexpr) else type(old)(v))

    over = dict(FORMS.get(name) or {})
    loads, kernel = prefill_loads, "rlloop.numerics.kernels.triton.prefill"
    for k, v in over.items():
        if hasattr(loads, k):
            put(loads, k, v)
    import importlib
    prefill = importlib.import_module(kernel)
    for k, v in over.items():
        if hasattr(prefill, k):
            put(prefill, k, v)
        else:
            assert hasattr(loads, k), k
    from rlloop.numerics.kernels.triton import attention, decode
    print(over, flush=True)
    assert launch.gluon_runs(torch.device("cuda:0"))
    if name == "reference":
        attention._better_kernels = lambda device: (None, None)
    else:
        prefill.FULL = True
        attention._better_kernels = lambda device: (decode, prefill)
    run = attention.attention
    with torch.inference_mode():
        cases = [given(*case, seed) for seed, case in enumerate(CHECKED)]
        if name == "reference":
            made = [[x.cpu() for x in run(*args, causal=causal)] for args, causal in cases]
            torch.save(made, REFERENCE + ".part")
            os.rename(REFERENCE + ".part", REFERENCE)
            return
        flash = None
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func as flash
        except Exception as error:
            print(name, "no FlashAttention 3:", repr(error)[:200], flush=True)
        # compile: the same forms at small sizes
        small = {(h, g, w, c > 0 or t > 1024, p) for h, g, w, s, t, c, p in TIMED}
        for h, g, w, long, p in sorted(small):
            run(*given(h, g, w, [1100 if long else 100] * 2, [0, 0], p, "bfloat16", 0)[0])
        for (h, g, w, counts, contexts, p, dtype) in CHECKED:
            n = 1100 if max(a + b for a, b in zip(counts, contexts or [0] * 99)) > 1024 else 100
            args, causal = given(h, g, w, [n, 64], None if contexts is None else [0, 0], p, dtype, 0)
            run(*args, causal=causal)
        torch.cuda.synchronize()
        compiled = time.time() - began
        while not os.path.exists(REFERENCE):
            time.sleep(0.2)
        with open(f"/tmp/sweep_prefill_gpu{gpu}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            bits, bad = torch.load(REFERENCE), []
            for at, ((args, causal), want) in enumerate(zip(cases, bits)):
                for repeat in range(2):
                    for kind, got, exact in zip(("out", "lse"), run(*args, causal=causal), want):
                        same = got.cpu().view(torch.uint8).eq(exact.view(torch.uint8)).all()
                        if not same:
                            bad.append(f"case {at} {kind}")
            json.dump({"compiled": compiled, "bad": sorted(set(bad))}, open(results, "w"))
            del cases, bits
            torch.cuda.empty_cache()
            rows = []
            for h, g, w, s, t, c, p in TIMED:
                args, _ = given(h, g, w, [t] * s, [c] * s, p, "bfloat16", 1)
                q, k, v = args[:3]
                work = 2e-12 * s * h * w * ((c + t) ** 2 - c * c)
                calls = {"ours": lambda: run(*args)}
                if not p and not c:
                    from torch.nn.attention import sdpa_kernel, SDPBackend
                    qq = q.view(s, t, h, w).transpose(1, 2)
                    kk2, vv2 = (x.view(s, t, g, w).transpose(1, 2).repeat_interleave(h // g, 1) for x in (k, v))

                    def cudnn():
                        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                            torch.nn.functional.scaled_dot_product_attention(qq, kk2, vv2, is_causal=True)
                    calls["cudnn"] = cudnn
                if flash is not None:
                    start = args[3].int()
                    if p:
                        kk, vv = (x.view(-1, p, g, w) for x in (k, v))
                        where = dict(seqused_k=torch.full((s,), c + t, dtype=torch.int32, device="cuda"), block_table=(args[5] // p).int().contiguous())
                    else:
                        kk, vv, where = k, v, dict(cu_seqlens_k=start)
                    calls["fa3"] = lambda: flash(q, kk, vv, max_seqlen_q=t, cu_seqlens_q=start, max_seqlen_k=c + t, causal=True, fa_version=3, **where)
                times = {key: [] for key in calls}
                for call in calls.values():
                    call(); call()
                torch.cuda.synchronize()
                n = max(2, int(10 / (work / 0.5 + 0.02)))  # about 10 ms
                clocks, zeros = {key: [] for key in calls}, None
                for _ in range(7):
                    for key, call in calls.items():
                        a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                        torch.cuda._sleep(200000 + 60000 * n)  # the host is ahead: launches do not count
                        a.record()
                        for _ in range(n):
                            call()
                        b.record()
                        torch.cuda._sleep(300000)  # cycles: tells the clock that the work left
                        c.record()
                        torch.cuda.synchronize()
                        times[key].append(a.elapsed_time(b) / n)
                        clocks[key].append(3e-1 / b.elapsed_time(c))  # GHz
                row = {key: work / statistics.median(each) * 1e3 for key, each in times.items()}
                row["clocks"] = {key: statistics.median(each) for key, each in clocks.items()}
                rows.append(row)
                json.dump({"compiled": compiled, "bad": sorted(set(bad)), "rows": rows}, open(results, "w"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--only", nargs="+")
    p.add_argument("--kill", type=float, default=85)
    p.add_argument("--child", nargs=3)
    a = p.parse_args()
    if a.child:
        return child(*a.child)
    import torch
    gpus = torch.cuda.device_count()
    if os.path.exists(REFERENCE):
        os.remove(REFERENCE)
    folder, began, running = tempfile.mkdtemp(), time.time(), {}
    for at, name in enumerate(["reference", *(a.only or FORMS)]):
        gpu = at % gpus
        out = open(f"{folder}/{at}.log", "w")
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2"}
        running[name] = (at, gpu, subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", name, str(gpu), f"{folder}/{at}.json"], stdout=out, stderr=out, env=env))
    while time.time() - began < a.kill and any(each[2].poll() is None for each in running.values()):
        time.sleep(0.5)
    head = [f"{h // g}q {s}x{t}" + (f"+{c}" if c else "") for h, g, w, s, t, c, _ in TIMED]
    print(f"{'TFLOP/s (of FA3 on the same GPU)':34s}" + "".join(f"{x:>15s}" for x in head))
    for name, (at, gpu, process) in running.items():
        killed = process.poll() is None
        if killed:
            process.kill()
        log = open(f"{folder}/{at}.log").read().strip()
        try:
            found = json.load(open(f"{folder}/{at}.json"))
        except Exception:
            found = {}
        if name == "reference":
            if process.returncode:
                print("reference failed:", log[-1500:])
            continue
        line = f"{name:25s} gpu {gpu}    "
        for row in found.get("rows", []):
            line += f"{row['ours']:8.0f} " + "".join(f"({row['ours'] / row[key]:.3f})" for key in ("fa3", "cudnn") if key in row)
        print(line)
        for key in ("ours", "cudnn", "fa3"):
            if False:
                continue
            line = f"    {key}: GHz, cycles of a processor for 2 x 64 x 64 (1,024 of products), zeros TFLOP/s:"
            for row in found.get("rows", []):
                if key in row:
                    ghz = row["clocks"][key]
                    line += f"  {ghz:.2f} {4.194304 * 132 * ghz / row[key] * 1e3:.0f}"
                    line += f" {row['zeros ' + key]:.0f}" if "zeros " + key in row else ""
            print(line)
        bad = found.get("bad")
        print(f"    bits: {'not reached' if bad is None else 'all equal' if not bad else bad}; compiled {found.get('compiled', 0):.0f} s; {'KILLED' if killed else f'exit {process.returncode}'}")
        if process.returncode or killed:
            print("    " + log[-800:])
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
