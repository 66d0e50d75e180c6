#!/usr/bin/env python3
"""Side-by-side performance of HTTP reverse proxies for LLM engines. See README.md.

  bench.py check  [NAME...]                 start each proxy, send one request of each kind, say what happened
  bench.py run    [NAME...] [--rounds N]    measure, one JSON line per proxy and round into results/
  bench.py report FILE...                   medians as tables
"""
import argparse, gzip, http.client, json, os, random, re, shutil, signal, socket, statistics, subprocess, sys, time, tomllib, zlib
from pathlib import Path

RIG = Path(__file__).resolve().parent
ROOT = RIG.parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
VENVS = Path(os.environ.get("RIG_VENVS", TARGET / "rig-venvs"))
WORK = Path(os.environ.get("RIG_WORK", TARGET / "rig"))
BIN = TARGET / "release"
BASE = int(os.environ.get("RIG_PORT", 19100))
MOCKS = {f"b{i}": f"127.0.0.1:{BASE + i}" for i in range(1, 5)}
SIMS = {f"b{i}": f"127.0.0.1:{BASE + 10 + i}" for i in range(1, 5)}
PORT, ADMIN = BASE + 80, BASE + 81

# ---------------------------------------------------------------- request bodies

WORDS = ("router cache block prefix token engine worker queue stream batch decode prefill model request latency the a of "
         "to and in for with on by from under over between after before until while when where which that this \"quoted\" "
         "line\nbreak naïve größe 你好 budget").split(" ")


def text(rng, n):
    out = []
    while n > 0:
        w = rng.choice(WORDS)
        out.append(w)
        n -= len(json.dumps(w)) - 1
    return " ".join(out)


def make_bodies(folder, size, groups, per_group, stream=False, max_tokens=64, shared=0.75):
    """Chat bodies of about `size` bytes; those of one group share the first `shared` of the prompt."""
    if folder.exists():
        return
    tmp = folder.with_suffix(".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    rng = random.Random(f"{size}-{groups}")
    room = max(size - 220, 64)
    for g in range(groups):
        head = text(rng, int(room * shared))
        for i in range(per_group):
            body = {"model": "mock", "stream": stream, "max_tokens": max_tokens, "temperature": 0.7, "messages": [
                {"role": "system", "content": head}, {"role": "user", "content": text(rng, int(room * (1 - shared)))}]}
            (tmp / f"g{g:02}_{i:03}.json").write_text(json.dumps(body, ensure_ascii=False))
    tmp.rename(folder)


BODIES = {
    "1k": dict(size=1024, groups=64, per_group=4),
    "32k": dict(size=32 << 10, groups=64, per_group=4),
    "256k": dict(size=256 << 10, groups=4, per_group=8),
    "sse16": dict(size=1024, groups=8, per_group=4, stream=True, max_tokens=16),
    "sse256": dict(size=1024, groups=8, per_group=4, stream=True, max_tokens=256),
    "sse1024": dict(size=1024, groups=8, per_group=4, stream=True, max_tokens=1024),
}


def bodies():
    """The folder of the bodies; other parameters, another folder."""
    b = WORK / f"bodies-{zlib.crc32(repr((WORDS, BODIES)).encode()):08x}"
    for name, made in BODIES.items():
        make_bodies(b / name, **made)
    return b


# ---------------------------------------------------------------- processes


def tree(pid):
    pids = [pid]
    try:
        for t in os.listdir(f"/proc/{pid}/task"):
            for k in Path(f"/proc/{pid}/task/{t}/children").read_text().split():
                pids += tree(int(k))
    except OSError:
        pass
    return pids


def memory(pid):
    """MiB of the process tree: resident, proportional (shared pages split), highest resident."""
    kb = {"VmRSS": 0, "Pss": 0, "VmHWM": 0}
    for p in tree(pid):
        for f in ("status", "smaps_rollup"):
            try:
                for line in Path(f"/proc/{p}/{f}").read_text().splitlines():
                    k, _, v = line.partition(":")
                    if k in kb:
                        kb[k] += int(v.split()[0])
            except OSError:
                pass
    return {"rss": kb["VmRSS"] / 1024, "pss": kb["Pss"] / 1024, "peak": kb["VmHWM"] / 1024}


def get(addr, path, body=None, timeout=10):
    host, port = addr.split(":")
    c = http.client.HTTPConnection(host, int(port), timeout=timeout)
    try:
        c.request("POST" if body is not None or path.startswith("/_mock/config") else "GET", path, body,
                  {"Content-Type": "application/json"} if body is not None else {})
        r = c.getresponse()
        return r.status, {k.lower(): v for k, v in r.getheaders()}, r.read()
    finally:
        c.close()


class Proc:
    def __init__(self, cmd, log, env=None):
        self.log = open(log, "wb")
        self.p = subprocess.Popen(cmd, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  env={**os.environ, **(env or {})}, start_new_session=True)
        self.pid = self.p.pid

    def stop(self):
        """Ends our own process group only."""
        for sig, wait in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                pass
            try:
                self.p.wait(wait)
                if sig == signal.SIGTERM:
                    continue
                break
            except subprocess.TimeoutExpired:
                continue
        self.log.close()


def start_mock():
    p = Proc([BIN / "mock-engine", *[f"{n}={a}" for n, a in MOCKS.items()]], WORK / f"mock-{BASE}.log")
    try:
        wait_for(p, list(MOCKS.values())[-1], "/health", 5)
    except BaseException:
        p.stop()
        raise
    return [p]


def tokenizers():
    """The model "mock" with a real tokenizer, for simulated engines and for proxies that count tokens as they do."""
    model = WORK / "tokenizers" / "mock"
    if not model.exists():
        model.mkdir(parents=True)
        for f in (ROOT / "tests" / "fixtures" / "models" / "tiny-qwen3").glob("*.gz"):
            (model / f.stem).write_bytes(gzip.decompress(f.read_bytes()))
    return model.parent


def start_sims():
    """Engines with a prefix cache that publish what it holds: they tokenise, hash and decode, so they cost CPU."""
    sims = []
    try:
        for i, (name, addr) in enumerate(SIMS.items(), 1):
            cmd = [BIN / "kvgate", "sim", "--address", addr, "--model", "mock", "--tokenizers", tokenizers(), "--version", name,
                   "--event-port", BASE + 20 + i, "--replay-port", BASE + 30 + i, "--cache-blocks", 200000,
                   "--max-model-len", 1 << 20, "--max-step-tokens", 1 << 20]
            sims.append(Proc([str(w) for w in cmd], WORK / f"sim-{name}-{BASE}.log"))
            wait_for(sims[-1], addr, "/health", 20)
    except BaseException:
        for p in sims:
            p.stop()
        raise
    return sims


def pace(pace_us):
    get(next(iter(MOCKS.values())), f"/_mock/config?pace_us={pace_us}")


def wait_for(proc, addr, path, seconds):
    t0 = time.time()
    while time.time() - t0 < seconds:
        if proc.p.poll() is not None:
            raise RuntimeError(f"exited with {proc.p.returncode}; see {proc.log.name}")
        try:
            if get(addr, path, timeout=5)[0] == 200:
                return time.time() - t0
        except OSError:
            pass
        except http.client.HTTPException:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"not ready after {seconds} s; see {proc.log.name}")


def fill(s, run):
    known = {"BIN": BIN, "TOKENIZERS": WORK / "tokenizers", "PORT": PORT, "ADMIN": ADMIN, "THREADS": os.cpu_count(), "RUN": run, "CONF": run / "conf", "RIG": RIG,
             "VENVS": VENVS}
    return re.sub(r"@([A-Z]+)@", lambda m: str(known.get(m[1], m[0])), s)


def template(text, run, backends):
    """A configuration with everything filled in."""
    lines = []
    for line in fill(text, run).splitlines():
        if "@B_" not in line:
            lines.append(line)
            continue
        for i, (n, a) in enumerate(backends.items(), 1):
            h, p = a.split(":")
            b = {"NAME": n, "ADDR": a, "HOST": h, "PORT": p, "EVENTS": BASE + 20 + i}
            lines.append(re.sub(r"@B_([A-Z]+)@", lambda m: str(b[m[1]]), line))
    return "\n".join(lines) + "\n"


def backends_of(spec):
    return SIMS if spec.get("engines") == "sim" else MOCKS


def start_proxy(name, spec):
    """Returns (Proc, address, seconds to ready)."""
    backends = backends_of(spec)
    if "cmd" not in spec:
        return None, next(iter(backends.values())), 0.0
    run = WORK / "run" / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    tokenizers()
    files = {"conf" + Path(spec["conf"]).suffix: spec["conf"]} if "conf" in spec else {}
    for to, source in (files | spec.get("files", {})).items():
        (run / to).parent.mkdir(parents=True, exist_ok=True)
        (run / to).write_text(template((RIG / source).read_text(), run, backends))
    cmd = []
    for w in spec["cmd"]:
        if w == "@URLS@":
            cmd += [f"http://{a}" for a in backends.values()]
        elif w == "@ADDRS@":
            cmd += backends.values()
        elif w == "@CONF@":
            cmd.append(str(run / ("conf" + Path(spec["conf"]).suffix)))
        else:
            cmd.append(fill(w, run))
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", PORT))
    p = Proc(cmd, run / "log", spec.get("env"))
    try:
        took = wait_for(p, f"127.0.0.1:{PORT}", spec.get("ready", "/v1/models"), spec.get("wait", 10))
    except BaseException:
        p.stop()
        raise
    return p, f"127.0.0.1:{PORT}", took

# ---------------------------------------------------------------- measuring


def loadgen(addr, proxy, engines, **opt):
    cmd = [BIN / "loadgen", "--target", addr, *[w for p in engines for w in ("--engine-pid", str(p.pid))]]
    if proxy:
        cmd += ["--pid", str(proxy.pid)]
    for k, v in opt.items():
        cmd += ["--" + k.replace("_", "-"), str(v)]
    out = subprocess.run(cmd, capture_output=True, text=True, timeout=120)
    if out.returncode or not out.stdout.strip():
        raise RuntimeError(f"loadgen: {out.stderr.strip()[-300:]}")
    r = json.loads(out.stdout)
    r["foreign"] = max(0.0, r["machine_busy_s"] - r["cpu_s"] - r["loadgen_cpu_s"] - r["engine_cpu_s"]) / max(r["machine_all_s"], 1e-9)
    return r


def idle_connections(addr, proxy, n):
    before = memory(proxy.pid)
    p = subprocess.Popen([BIN / "loadgen", "--target", addr, "--path", "/v1/models", "--idle", str(n)], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
    try:
        r = json.loads(p.stdout.readline())
        time.sleep(0.5)
        after = memory(proxy.pid)
    finally:
        p.stdin.close()
        p.wait(10)
    return {"open": r["open"], "failed": r["failed"], "rss": after["rss"], "pss": after["pss"],
            "kb_per_conn": (after["pss"] - before["pss"]) * 1024 / max(r["open"], 1)}


def turn(name, spec, mock, b, scale, only=()):
    sims = start_sims() if spec.get("engines") == "sim" else []
    try:
        return measure(name, spec, sims or mock, b, scale, only)
    finally:
        for p in sims:
            p.stop()


def measure(name, spec, engines, b, scale, only):
    slow, simulated = spec.get("slow", False), spec.get("engines") == "sim"
    proxy, addr, took = start_proxy(name, spec)
    out = {"name": name, "policy": spec["policy"], "routes": spec["routes"], "start_s": round(took, 2), "at": time.time()}
    try:
        if simulated:  # a model's tokenizer is loaded when it is first asked for
            get(addr, "/v1/chat/completions", sorted((b / "1k").iterdir())[0].read_bytes())
            time.sleep(2)
        time.sleep(0.5)
        s = lambda x: round(x * scale, 2)
        if proxy:
            out["idle"] = memory(proxy.pid)
        loads = {
            "low": dict(bodies="1k", conns=8, rate=20 if slow else 200, seconds=3, warmup=0.6),
            "sse_low": dict(bodies="sse16", conns=8, rate=10 if slow else 80, seconds=2.5, warmup=0.5),
            "rate_1k": dict(bodies="1k", conns=32, rate=20 if slow else 200 if simulated else 1000, seconds=2.5, warmup=0.7),
            "rate_32k": dict(bodies="32k", conns=32, rate=20 if slow else 40 if simulated else 400, seconds=2.5, warmup=0.7),
            "1k": dict(bodies="1k", conns=32, seconds=2.5, warmup=0.7),
            "32k": dict(bodies="32k", conns=32, seconds=2.5, warmup=0.7),
            "256k": dict(bodies="256k", conns=8, seconds=2, warmup=0.5),
            "get": dict(path="/v1/models", conns=32, seconds=1.5, warmup=0.4),
            "sse_paced": dict(bodies="sse256", conns=8 if slow else 64, seconds=3, warmup=1),
            "sse_max": dict(bodies="sse1024", conns=16, seconds=2, warmup=0.5),
        }
        for load, opt in loads.items():
            if only and load not in only or simulated and load == "sse_paced":
                continue
            if not simulated:
                pace(5000 if load == "sse_paced" else 0)
            opt["seconds"] = s(opt["seconds"])
            if "bodies" in opt:
                opt["bodies"] = b / opt["bodies"]
            out[load] = loadgen(addr, proxy, engines, **opt)
        if proxy and not only:
            out["loaded"] = memory(proxy.pid)
            out["conns2000"] = idle_connections(addr, proxy, 2000)
    except Exception as e:
        out["failed"] = f"{type(e).__name__}: {e}"
    finally:
        if proxy:
            proxy.stop()
        if not simulated:
            pace(0)
    return out


def run(args, specs):
    b = bodies()
    (WORK / "results").mkdir(exist_ok=True)
    path = Path(args.out) if args.out else WORK / "results" / time.strftime("%Y%m%d-%H%M%S.jsonl")
    mock = start_mock()
    try:
        with open(path, "a") as f:
            for rnd in range(args.rounds):
                for name, spec in specs.items():
                    if rnd >= spec.get("rounds", args.rounds):
                        continue
                    t0 = time.time()
                    try:
                        out = turn(name, spec, mock, b, args.scale, args.only)
                    except Exception as e:
                        out = {"name": name, "policy": spec["policy"], "failed": f"{type(e).__name__}: {e}"}
                    out["round"] = rnd
                    f.write(json.dumps(out) + "\n")
                    f.flush()
                    print(f"round {rnd} {name:20} {time.time() - t0:5.1f} s  {brief(out)}", flush=True)
    finally:
        for p in mock:
            p.stop()
    print(path)


def brief(o):
    if "failed" in o:
        return "FAILED " + o["failed"]
    done = [k for k in LOADS if k in o]
    bad = sum(o[k]["errors"] + sum(v for c, v in o[k]["statuses"].items() if c != "200") for k in done)
    said = [f"{k} p50 {o[k]['latency']['p50_us']:.0f} us" for k in done if "low" in k]
    said += [f"{k} {per_1000(o[k]):.1f} ms/1000" for k in done if "rate" in k]
    if "1k" in o:
        said.append(f"1k {o['1k']['rps']:.0f}/s {per_1000(o['1k']):.1f} ms/1000")
    if "sse_paced" in o:
        said.append(f"sse {per_mchunk(o['sse_paced']):.2f} s/M")
    return "  ".join(said) + f"  foreign {max(o[k]['foreign'] for k in done):.0%}  bad {bad}"


def check(args, specs):
    b = bodies()
    mock = start_mock()
    one = {k: sorted((b / k).iterdir())[0].read_bytes() for k in ("1k", "256k", "sse16")}
    try:
        for name, spec in specs.items():
            sims = []
            try:
                sims = start_sims() if spec.get("engines") == "sim" else []
                proxy, addr, took = start_proxy(name, spec)
            except BaseException as e:
                for p in sims:
                    p.stop()
                if not isinstance(e, Exception):
                    raise
                print(f"{name:20} DOES NOT START: {e}", flush=True)
                continue
            try:
                said = [f"ready in {took:.1f} s"]
                seen = []
                for _ in range(8):
                    st, h, body = get(addr, "/v1/chat/completions", one["1k"])
                    m = re.search(rb'"system_fingerprint":"([^"]+)"', body)
                    seen.append(m[1].decode() if m else "?")
                said.append(f"chat {st} via {','.join(seen)}{'' if 'x-backend' in h else ' (X-Backend dropped)'}")
                st, h, body = get(addr, "/v1/chat/completions", one["256k"])
                said.append(f"256k {st}")
                st, h, body = get(addr, "/v1/chat/completions", one["sse16"])
                said.append(f"sse {st} {body.count(b'data: ')} events done={b'[DONE]' in body}")
                said.append(f"models {get(addr, '/v1/models')[0]}")
                if proxy:
                    said.append("idle rss {rss:.0f} pss {pss:.0f} MiB".format(**memory(proxy.pid)))
                print(f"{name:20} " + "; ".join(said), flush=True)
            except Exception as e:
                print(f"{name:20} FAILED {type(e).__name__}: {e}", flush=True)
            finally:
                for p in [proxy, *sims]:
                    if p:
                        p.stop()
    finally:
        for p in mock:
            p.stop()

# ---------------------------------------------------------------- report

PACED = ("low", "sse_low", "rate_1k", "rate_32k", "sse_paced")  # loads at a fixed rate
LOADS = ("low", "sse_low", "rate_1k", "rate_32k", "1k", "32k", "256k", "get", "sse_paced", "sse_max")


def per_1000(r):
    return r["cpu_s"] * 1e6 / r["ok"] if r["ok"] else float("nan")


def per_mchunk(r):
    return r["cpu_s"] * 1e6 / r["events"] if r["events"] else float("nan")


def med(rows, f):
    v = []
    for r in rows:
        try:
            x = f(r)
        except (KeyError, ZeroDivisionError):  # this load was not run
            continue
        if x == x:
            v.append(x)
    return statistics.median(v) if v else float("nan")


def spread(rows, f):
    v = [x for x in (f(r) for r in rows if "1k" in r) if x == x]
    return (max(v) - min(v)) / statistics.median(v) if len(v) > 1 and statistics.median(v) else float("nan")


def table(title, head, rows):
    rows = [r for r in rows if any(isinstance(c, float) and c == c for c in r)]
    if not rows:
        return
    print("###", title + "\n")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for r in rows:
        print("| " + " | ".join("–" if isinstance(c, float) and c != c else c if isinstance(c, str) else f"{c:,.4g}" if abs(c) < 1000 else f"{c:,.0f}" for c in r) + " |")
    print()


def report(args):
    by = {}
    for f in args.names:
        for line in open(f):
            r = json.loads(line)
            by.setdefault(r["name"], []).append(r)
    ok = {n: [r for r in rs if any(k in r for k in LOADS)] for n, rs in by.items()}
    for n, rs in by.items():
        for r in rs:
            if "failed" in r:
                print(f"{n} round {r['round']}: {r['failed']}")
    ref = args.ref
    direct = ok.get("direct", [])
    cpu = lambda n, k: med(ok.get(n, []), lambda r: per_1000(r[k]))
    lat = lambda n, k, h, q: med(ok.get(n, []), lambda r: r[k][h][q])
    names = [n for n in ok if ok[n]]
    prox = [n for n in names if n != "direct"]
    table(f"CPU of the proxy, ms per 1000 requests (closed loop), and ratio to {ref}",
          ["proxy", "n", "1 KB", "32 KB", "256 KB", "GET", f"1 KB / {ref}", f"32 KB / {ref}", f"256 KB / {ref}", "spread 1 KB"],
          [[n, len(ok[n]), cpu(n, "1k"), cpu(n, "32k"), cpu(n, "256k"), cpu(n, "get"), *[cpu(n, k) / cpu(ref, k) for k in ("1k", "32k", "256k")],
            spread(ok[n], lambda r: per_1000(r["1k"]))] for n in prox])
    table("CPU of the proxy at a fixed rate (1 KB: 1000/s, 32 KB: 400/s; before simulated engines 200/s and 40/s), ms per 1000 requests",
          ["proxy", "n", "1 KB", "32 KB", f"1 KB / {ref}", f"32 KB / {ref}", "p50 µs 1 KB", "p99 µs 1 KB", "p50 µs 32 KB", "p99 µs 32 KB"],
          [[n, len(ok[n]), cpu(n, "rate_1k"), cpu(n, "rate_32k"), *[cpu(n, k) / cpu(ref, k) for k in ("rate_1k", "rate_32k")],
            *[lat(n, k, "latency", q) for k in ("rate_1k", "rate_32k") for q in ("p50_us", "p99_us")]] for n in names])
    table("Requests/s at saturation (shared machine: see foreign CPU), affinity = share on each group's busiest backend",
          ["proxy", "1 KB", "32 KB", "256 KB", "GET", f"1 KB / {ref}", "affinity 1 KB", "affinity 32 KB", "busiest backend 32 KB", "p99 ms 1 KB", "not 200", "errors", "foreign CPU"],
          [[n, *[med(ok[n], lambda r: r[k]["rps"]) for k in ("1k", "32k", "256k", "get")],
            med(ok[n], lambda r: r["1k"]["rps"]) / med(ok[ref], lambda r: r["1k"]["rps"]) if ref in ok else float("nan"),
            med(ok[n], lambda r: r["1k"]["affinity"]), med(ok[n], lambda r: r["32k"]["affinity"]),
            med(ok[n], lambda r: max(r["32k"]["backends"].values()) / sum(r["32k"]["backends"].values())), lat(n, "1k", "latency", "p99_us") / 1e3,
            sum(v for r in ok[n] for k in LOADS if k in r for c, v in r[k]["statuses"].items() if c != "200"),
            sum(r[k]["errors"] for r in ok[n] for k in LOADS if k in r), med(ok[n], lambda r: r["1k"]["foreign"])] for n in names])
    d = lambda k, h, q: med(direct, lambda r: r[k][h][q])
    table("Latency at a low fixed rate, µs (added = minus direct)",
          ["proxy", "p50", "p99", "added p50", "added p99", "SSE first event p50", "p99", "added TTFC p50", "added p99"],
          [[n, lat(n, "low", "latency", "p50_us"), lat(n, "low", "latency", "p99_us"),
            lat(n, "low", "latency", "p50_us") - d("low", "latency", "p50_us"), lat(n, "low", "latency", "p99_us") - d("low", "latency", "p99_us"),
            lat(n, "sse_low", "first_event", "p50_us"), lat(n, "sse_low", "first_event", "p99_us"),
            lat(n, "sse_low", "first_event", "p50_us") - d("sse_low", "first_event", "p50_us"),
            lat(n, "sse_low", "first_event", "p99_us") - d("sse_low", "first_event", "p99_us")] for n in names])
    mc = lambda n, k: med(ok.get(n, []), lambda r: per_mchunk(r[k]))
    table("Streaming: CPU s per 1M events",
          ["proxy", "paced CPU", f"/ {ref}", "events/s", "gap p50 ms", "gap p99 ms", "unpaced events/s", "unpaced CPU", f"/ {ref}", "cut streams"],
          [[n, mc(n, "sse_paced"), mc(n, "sse_paced") / mc(ref, "sse_paced"), med(ok[n], lambda r: r["sse_paced"]["events_per_s"]),
            lat(n, "sse_paced", "gaps", "p50_us") / 1e3, lat(n, "sse_paced", "gaps", "p99_us") / 1e3,
            med(ok[n], lambda r: r["sse_max"]["events_per_s"]), mc(n, "sse_max"), mc(n, "sse_max") / mc(ref, "sse_max"),
            sum(r[k]["streams_cut"] for r in ok[n] for k in ("sse_low", "sse_paced", "sse_max") if k in r)] for n in names])
    m = lambda n, *p: med(ok[n], lambda r: r[p[0]][p[1]])
    table("Memory, MiB (process tree; pss splits shared pages)",
          ["proxy", "start s", "idle rss", "idle pss", "loaded pss", "peak rss", "2000 conns pss", "KiB per idle conn", "open of 2000"],
          [[n, med(ok[n], lambda r: r["start_s"]), m(n, "idle", "rss"), m(n, "idle", "pss"), m(n, "loaded", "pss"), m(n, "loaded", "peak"),
            m(n, "conns2000", "pss"), m(n, "conns2000", "kb_per_conn"), m(n, "conns2000", "open")] for n in prox])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=("check", "run", "report"))
    ap.add_argument("names", nargs="*")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--scale", type=float, default=1.0, help="stretch the measured windows")
    ap.add_argument("--only", type=lambda v: v.split(","), default=[], help="these loads, e.g. low,sse_low")
    ap.add_argument("--rt", action="store_true", help="run the whole rig under SCHED_RR (root): true latencies on a busy machine; low-rate loads only")
    ap.add_argument("--proxies", default=RIG / "proxies.toml", help="proxy table; repeatable through a comma list")
    ap.add_argument("--ref", default="nginx", help="proxy that ratios refer to")
    ap.add_argument("--out")
    a = ap.parse_args()
    # whoever is told to end stops what it started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if a.what == "report":
        return report(a)
    if a.rt:
        if not a.only or not set(a.only) <= set(PACED):
            ap.error(f"--rt needs --only with loads of {','.join(PACED)}: the others would starve the machine")
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    WORK.mkdir(parents=True, exist_ok=True)
    specs = {}
    for f in str(a.proxies).split(","):
        specs |= tomllib.loads(Path(f).read_text())
    if a.names:
        specs = {n: specs[n] for n in a.names}
    (check if a.what == "check" else run)(a, specs)


if __name__ == "__main__":
    main()
